package legato

import (
	"time"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
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
