package legato

import (
	"time"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
)

// SessionEvent is one message of a session: *[FrameAccepted], *[FrameDropped], *[FrameDelta], *[FrameResult],
// *[Heartbeat] or *[GoAway]. New kinds may be added.
type SessionEvent interface{ sessionEvent() }

// FrameAccepted: a frame was taken in.
type FrameAccepted struct {
	Sequence uint64
	// FrameCredits is the number of frames that may be sent now.
	FrameCredits uint32
}

// FrameDropped: a frame gets no results.
type FrameDropped struct {
	Sequence uint64
	Reason   DropReason
	// FrameCredits is the number of frames that may be sent now.
	FrameCredits uint32
	// Total is the number of frames dropped so far, this one included.
	Total uint64
}

// DropReason says why a frame gets no results. Servers may send ones that are not listed here.
type DropReason string

// The reasons of this revision of the contract.
const (
	DropSuperseded DropReason = "SUPERSEDED" // a newer frame took its place
	DropTooOld     DropReason = "TOO_OLD"    // older than SessionConfig.MaxFrameAge
	DropOverloaded DropReason = "OVERLOADED" // beyond the credits, or its results were not read in time
	DropCancelled  DropReason = "CANCELLED"  // by the client
)

// FrameDelta is an event of a task that runs, with [SessionConfig.StreamDeltas].
type FrameDelta struct {
	Sequence uint64
	TaskID   string
	// Event is never [Finished]: the FrameResult is the end. nil is an event newer than this package.
	Event Event
}

// FrameResult is one task's end on one frame.
type FrameResult struct {
	// Stamp is the frame's.
	Stamp FrameStamp
	TaskResult
	Image ImageInfo
	// Last is true in the last result of its frame.
	Last bool
	// Age is how long after the frame's capture the server sent this.
	Age time.Duration
}

// GoAway: the server will end the session; open another one elsewhere. Frames sent from now on are dropped.
type GoAway struct {
	// TimeLeft is how long running work may go on.
	TimeLeft time.Duration
	// Err says why; nil where the session's greatest age was reached.
	Err error
}

func (*FrameAccepted) sessionEvent() {}
func (*FrameDropped) sessionEvent()  {}
func (*FrameDelta) sessionEvent()    {}
func (*FrameResult) sessionEvent()   {}
func (*Heartbeat) sessionEvent()     {}
func (*GoAway) sessionEvent()        {}

// sessionEventOf is nil for a message newer than this package.
func sessionEventOf(from *legatov1.SessionResponse) SessionEvent {
	switch one := from.Message.(type) {
	case *legatov1.SessionResponse_Accepted:
		return &FrameAccepted{one.Accepted.Sequence, one.Accepted.FrameCredits}
	case *legatov1.SessionResponse_Dropped:
		reason := DropReason(word(one.Dropped.Reason.String(), "DROP_REASON_"))
		return &FrameDropped{one.Dropped.Sequence, reason, one.Dropped.FrameCredits, one.Dropped.DroppedTotal}
	case *legatov1.SessionResponse_Delta:
		return &FrameDelta{one.Delta.Sequence, one.Delta.TaskId, eventOf(one.Delta.Event)}
	case *legatov1.SessionResponse_Result:
		return frameResultOf(one.Result)
	case *legatov1.SessionResponse_Heartbeat:
		return &Heartbeat{}
	case *legatov1.SessionResponse_GoAway:
		return &GoAway{one.GoAway.TimeLeft.AsDuration(), goAwayError(one.GoAway)}
	}
	return nil
}

func frameResultOf(from *legatov1.FrameResult) *FrameResult {
	stamp, image := stampOf(from.Stamp), imageInfoOf(from.Image)
	result := taskResultOf(from.Result, Info{Stamp: stamp, Image: image})
	return &FrameResult{stamp, result, image, from.LastForFrame, from.Age.AsDuration()}
}

func goAwayError(from *legatov1.SessionGoAway) error {
	if from.Reason.GetCode() == 0 {
		return nil
	}
	return errorOfTask(from.Reason)
}

func termsOf(from *legatov1.SessionOpened) SessionTerms {
	return SessionTerms{
		SessionID:              from.SessionId,
		Model:                  from.Model,
		FrameCredits:           from.FrameCredits,
		MaxInFlight:            from.MaxInFlight,
		Heartbeat:              from.HeartbeatInterval.AsDuration(),
		ServerContractRevision: from.ContractRevision,
	}
}
