package legato

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"time"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

// Event is one piece of news of a stream:
//
//	stream = *Queued Started *( delta / Heartbeat ) Finished
//	delta  = TextDelta / ReasoningDelta / PointedObject / Detection / OutlineDelta / TokensDelta
//
// with heartbeats also before Started. All are pointers; new kinds may be added.
type Event interface{ event() }

// Queued: the request waits for room.
type Queued struct {
	// Position is the number of requests ahead.
	Position int
	// EstimatedWait is the server's guess; 0 where it has none.
	EstimatedWait time.Duration
}

// Started: the request runs.
type Started struct {
	RequestID string
	Model     string
	// InputTokens come before the first generated one; CachedTokens of them were computed before.
	InputTokens, CachedTokens int
	Image                     ImageInfo
	QueueTime                 time.Duration
}

// TextDelta is new text of an answer or a caption, to be appended.
type TextDelta struct {
	Text string
	// Tokens are those that completed the text, with [WithTokens].
	Tokens []Token
}

// ReasoningDelta is new text of the reasoning, to be appended.
type ReasoningDelta struct {
	Text string
	// Grounding counts code points of the whole reasoning.
	Grounding []Grounding
	// Tokens are those that completed the text and the grounding, with [WithTokens].
	Tokens []Token
}

// TokensDelta holds tokens that completed no text, with [WithTokens]: values, marks, the ending one.
type TokensDelta struct {
	Tokens []Token
}

// OutlineDelta is a piece of an outline.
type OutlineDelta struct {
	// Index tells which outline of the result.
	Index int
	// Path is to be appended.
	Path string
	// Box is in the first delta of an outline only.
	Box *Box
}

// Heartbeat: nothing new for a while. It is also a [SessionEvent].
type Heartbeat struct{}

// Finished is the last event: the whole result, all deltas included.
type Finished struct {
	Result Result
	Info   Info
}

func (*Queued) event()         {}
func (*Started) event()        {}
func (*TextDelta) event()      {}
func (*ReasoningDelta) event() {}
func (*PointedObject) event()  {}
func (*Detection) event()      {}
func (*OutlineDelta) event()   {}
func (*TokensDelta) event()    {}
func (*Heartbeat) event()      {}
func (*Finished) event()       {}

// eventOf is nil for an event newer than this package.
func eventOf(from *legatov1.GenerateResponse) Event {
	switch one := from.GetEvent().(type) {
	case *legatov1.GenerateResponse_Queued:
		return &Queued{int(one.Queued.Position), one.Queued.EstimatedWait.AsDuration()}
	case *legatov1.GenerateResponse_Started:
		return startedOf(one.Started)
	case *legatov1.GenerateResponse_Text:
		return &TextDelta{one.Text.Text, all(one.Text.Tokens, tokenOf)}
	case *legatov1.GenerateResponse_Reasoning:
		thought := one.Reasoning
		return &ReasoningDelta{thought.Text, all(thought.Grounding, groundingOf), all(thought.Tokens, tokenOf)}
	case *legatov1.GenerateResponse_Point:
		return pointedOf(one.Point)
	case *legatov1.GenerateResponse_Object:
		return detectionOf(one.Object)
	case *legatov1.GenerateResponse_Outline:
		return outlineDeltaOf(one.Outline)
	case *legatov1.GenerateResponse_Tokens:
		return &TokensDelta{all(one.Tokens.Tokens, tokenOf)}
	case *legatov1.GenerateResponse_Heartbeat:
		return &Heartbeat{}
	case *legatov1.GenerateResponse_Finished:
		info := infoOf(one.Finished.Info)
		return &Finished{taskResultOf(one.Finished.Result, info).Result, info}
	}
	return nil
}

func startedOf(from *legatov1.Started) *Started {
	return &Started{
		RequestID:    from.RequestId,
		Model:        from.Model,
		InputTokens:  int(from.InputTokens),
		CachedTokens: int(from.CachedTokens),
		Image:        imageInfoOf(from.Image),
		QueueTime:    from.QueueTime.AsDuration(),
	}
}

func outlineDeltaOf(from *legatov1.OutlineDelta) *OutlineDelta {
	delta := &OutlineDelta{Index: int(from.Index), Path: from.PathDelta}
	if from.Box != nil {
		box := boxOf(from.Box)
		delta.Box = &box
	}
	return delta
}

// resumptionDelays are the longest waits before each resumption: a proxy has another server at once, a name may need a
// moment, and a server that was alone comes back.
var resumptionDelays = []time.Duration{50 * time.Millisecond, time.Second, 3 * time.Second}

// eventReader yields the events of an answer, over the servers that it takes, and sees that none is missing. Where the
// server sends checkpoints, events wait for the one that covers them, so that none is told twice.
type eventReader struct {
	yield       func(Event, error) bool
	next        uint64
	begun       bool // some server has sent something
	started     *Started
	checkpoint  *legatov1.Checkpoint // the sum; nil without any
	uncovered   []Event
	finished    *Finished // kept for the end: nothing is running any more when a caller has it
	resumptions int
}

// replay reads a stream to its end, or until the caller has enough; both give nil.
func (r *eventReader) replay(stream grpc.ServerStreamingClient[legatov1.GenerateResponse], err error) *Error {
	if err != nil {
		return errorOf(err, nil)
	}
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return r.end()
		}
		if err != nil {
			return errorOf(err, stream.Trailer())
		}
		if message.Index != r.next {
			return incomplete("event %d of the stream is missing, got %d", r.next, message.Index)
		}
		r.next++
		r.begun = true
		if !r.read(message) {
			return nil
		}
	}
}

// read is false when the caller has enough.
func (r *eventReader) read(message *legatov1.GenerateResponse) bool {
	if message.Checkpoint != nil {
		if r.checkpoint == nil {
			r.checkpoint = &legatov1.Checkpoint{}
		}
		proto.Merge(r.checkpoint, message.Checkpoint)
	}
	switch event := eventOf(message).(type) {
	case *Finished:
		r.finished = event
		return true
	case *Queued:
		return r.started != nil || r.yield(event, nil)
	case *Started:
		if r.started != nil { // of several servers the first one that starts is told
			return true
		}
		r.started = event
		return r.yield(event, nil)
	case *Heartbeat:
		return r.yield(event, nil)
	case nil:
	default:
		r.uncovered = append(r.uncovered, event)
	}
	if message.Checkpoint == nil && r.checkpoint != nil {
		return true
	}
	for _, event := range r.uncovered {
		if !r.yield(event, nil) {
			return false
		}
	}
	r.uncovered = nil
	return true
}

func (r *eventReader) end() *Error {
	if r.finished == nil {
		return incomplete("the stream ended before its answer was finished")
	}
	r.yield(r.finished, nil)
	return nil
}

// resumes waits and reports whether to ask again, with what the request then says of the answer so far.
func (r *eventReader) resumes(ctx context.Context, failure *Error, request *legatov1.GenerateRequest) bool {
	if !r.canResume(failure) || r.resumptions == len(resumptionDelays) {
		return false
	}
	// A lost server had many streams.
	longest := resumptionDelays[r.resumptions]
	delay := max(longest/2+rand.N(longest/2+1), failure.RetryAfter)
	if !sleepWithin(ctx, delay) {
		return false
	}
	r.resumptions++
	r.next, r.uncovered, r.finished = 0, nil, nil
	if r.checkpoint != nil {
		request.ResumeFrom = r.checkpoint
		request.Options = proto.CloneOf(request.Options)
		request.Options.RequestId = r.started.RequestID
	}
	return true
}

// canResume: before the first event gRPC itself has retried, and without checkpoints nothing can be. A failure without
// a reason is not the server's: its connection was cut.
func (r *eventReader) canResume(failure *Error) bool {
	if !r.begun || (r.checkpoint == nil && r.started != nil) {
		return false
	}
	switch failure.Code {
	case codes.Unavailable:
		return true
	case codes.Internal, codes.Unknown:
		return failure.Reason == ""
	case codes.ResourceExhausted:
		return failure.RetryAfter > 0 && r.resumptions > 0
	}
	return false
}

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
