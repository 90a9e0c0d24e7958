package legato

import (
	"strings"
	"time"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Result is what a task gives: *[QueryResult], *[DetectResult] and their like, one for each skill.
type Result interface{ result() }

// Detection is one object with its box. It is also an [Event]: sent once, whole.
type Detection struct {
	Box   Box
	Label string
	// Confidence is in [0, 1]; nil where the model gives none.
	Confidence *float32
	// TrackID names the same physical object in all frames of a session; empty where it is not tracked.
	TrackID string
	// Motion is how it moved when its frame was captured; nil where it is not tracked.
	Motion *Motion
}

// PointedObject is one object with a point on it. It is also an [Event]: sent once, whole.
type PointedObject struct {
	Point Point
	Label string
	// Confidence is in [0, 1]; nil where the model gives none.
	Confidence *float32
}

// Outline is the shape of one object.
type Outline struct {
	// Path is an SVG path in the unit square of Box; empty where the model's could not be read.
	Path  string
	Box   Box
	Label string
	// Confidence is in [0, 1]; nil where the model gives none.
	Confidence *float32
	// Coarse is true for the decoder's own path, which no refiner improved.
	Coarse bool
}

// Polygons are the rings of the path, in the coordinates of the whole picture. Curves become chords.
func (o *Outline) Polygons() ([][]Point, error) {
	rings, err := polygons(o.Path)
	width, height := o.Box.XMax-o.Box.XMin, o.Box.YMax-o.Box.YMin
	for _, ring := range rings {
		for i, at := range ring {
			ring[i] = Point{o.Box.XMin + at.X*width, o.Box.YMin + at.Y*height}
		}
	}
	return rings, err
}

// Reasoning is what the model thought before it answered.
type Reasoning struct {
	Text      string
	Grounding []Grounding
}

// Grounding ties a span of the reasoning, counted in code points (runes), to places.
type Grounding struct {
	Start, End int
	Points     []Point
}

// Info is what every answer tells beside its result.
type Info struct {
	// RequestID is that of [WithRequestID], or the server's.
	RequestID string
	// Model is the name of the model that answered.
	Model string
	// Finish is why the task ended.
	Finish FinishReason
	Usage  Usage
	// Timings were measured on the server.
	Timings Timings
	// Image is the picture; its zero value: there was none.
	Image ImageInfo
	// Stamp is that of [WithStamp].
	Stamp FrameStamp
	// Tokens are all that were sampled, with [WithTokens].
	Tokens []Token
	// Resumptions count how often the server lost its engine while it worked on this, and the client its server.
	Resumptions int
	// Images are those of [WithImages], of which Image is the first.
	Images []ImageInfo
}

// FinishReason says why a task ended. Servers may send ones that are not listed here.
type FinishReason string

// The reasons of this revision of the contract.
const (
	FinishStop       FinishReason = "STOP"        // the model was done, or a stop text appeared
	FinishLength     FinishReason = "LENGTH"      // the token bound was reached; the result is cut
	FinishMaxObjects FinishReason = "MAX_OBJECTS" // there may be more
	FinishSuperseded FinishReason = "SUPERSEDED"  // a newer frame took its place; the result is partial
	FinishCancelled  FinishReason = "CANCELLED"   // the result is partial
)

// Usage is what a task cost, in tokens; nil where the server does not say.
type Usage struct {
	Input, Output            uint32
	Cached, Image, Reasoning *uint32
}

// Timings say where the time went; 0 where it was not measured.
type Timings struct {
	Queue, Image, Prefill, FirstToken, Decode, Total time.Duration
}

// ImageInfo is the picture that an answer speaks about.
type ImageInfo struct {
	// ImageID names it in [Held]; empty where the server does not hold it.
	ImageID string
	// Width and Height are in pixels, after EXIF orientation.
	Width, Height int
	// CacheHit is true where the server reused work done for the picture before.
	CacheHit bool
}

// Size is what [Box.Pixels] and [Point.Pixels] take.
func (i ImageInfo) Size() (width, height int) { return i.Width, i.Height }

// FrameStamp says where and when a picture was taken. It is echoed verbatim and never interpreted, except Sequence and
// CaptureTime in a session.
type FrameStamp struct {
	// FrameID is the coordinate frame or camera, as the caller names it.
	FrameID string
	// CaptureTime is when the picture was taken, on the caller's clock; its zero value is none. A session measures
	// [SessionConfig.MaxFrameAge] from it where it is given, and follows the objects of tracked tasks by it.
	CaptureTime time.Time
	// Sequence is the caller's frame counter. In a session it names the frame and must grow with every frame.
	Sequence uint64
}

// TaskResult is how one of several tasks ended: Result, or Err.
type TaskResult struct {
	// TaskID is that of [WithTaskID].
	TaskID string
	// Result is nil where the task failed.
	Result Result
	// Err is an *[Error]; nil where the task did not fail.
	Err error
}

// TasksResult is what [Client.RunTasks] gives.
type TasksResult struct {
	// Results are in the order of the tasks.
	Results []TaskResult
	Info    Info
}

// Token is one sampled token: text, or the value that it carries.
type Token struct {
	ID uint32
	// Text is empty while a character is incomplete.
	Text string
	// Bytes are its own, in UTF-8 perhaps a part of a character; empty if it carries no text.
	Bytes []byte
	// Logprob is the natural logarithm of the probability that the model gave it, its value's included; nil unless
	// [WithLogprobs].
	Logprob *float32
	// Coordinate is a place's share of the width or the height; nil for other tokens.
	Coordinate *float32
	// Size is that of the box around the place before it; nil for other tokens.
	Size *Size
	// Alternatives are the likeliest tokens in its place, the likeliest first, with [WithAlternatives].
	Alternatives []Alternative
	// Certainty is nil for tokens without a value, and unless [WithLogprobs].
	Certainty *Certainty
}

// Alternative is a token that the model might have chosen.
type Alternative struct {
	ID      uint32
	Text    string
	Logprob float32
	// Bytes are as those of [Token].
	Bytes []byte
}

// Certainty is how sure the model was of a token with a value. The product of both over the tokens of an object is its
// confidence, before any calibration.
type Certainty struct {
	// Existence is the token's probability against that of ending.
	Existence float32
	// Concentration is the probability of the values close to the token's.
	Concentration float32
}

func (s FrameStamp) message() *legatov1.FrameStamp {
	return &legatov1.FrameStamp{FrameId: s.FrameID, CaptureTime: timestamp(s.CaptureTime), Sequence: s.Sequence}
}

// From the contract's messages to this package's values; absent messages become zero values.

func tasksOf(from *legatov1.RunTasksResponse) *TasksResult {
	shared := infoOf(from.Info)
	result := &TasksResult{make([]TaskResult, len(from.Results)), shared}
	for i, one := range from.Results {
		info := shared
		if i < len(from.Tokens) {
			info.Tokens = all(from.Tokens[i].Tokens, tokenOf)
		}
		result.Results[i] = taskResultOf(one, info)
	}
	return result
}

func detectionOf(from *legatov1.DetectedObject) *Detection {
	return &Detection{boxOf(from.Box), from.Label, from.Confidence, from.TrackId, motionOf(from.Motion)}
}

func pointedOf(from *legatov1.PointedObject) *PointedObject {
	return &PointedObject{pointOf(from.Point), from.Label, from.Confidence}
}

func outlineOf(from *legatov1.Outline) *Outline {
	return &Outline{from.Path, boxOf(from.Box), from.Label, from.Confidence, from.Coarse}
}

func reasoningOf(from *legatov1.Reasoning) *Reasoning {
	if from == nil {
		return nil
	}
	return &Reasoning{from.Text, all(from.Grounding, groundingOf)}
}

func groundingOf(from *legatov1.Grounding) Grounding {
	return Grounding{int(from.StartIndex), int(from.EndIndex), all(from.Points, pointOf)}
}

func infoOf(from *legatov1.ResponseInfo) Info {
	return Info{
		RequestID:   from.GetRequestId(),
		Model:       from.GetModel(),
		Finish:      finishOf(from.GetFinishReason()),
		Usage:       usageOf(from.GetUsage()),
		Timings:     timingsOf(from.GetTimings()),
		Image:       imageInfoOf(from.GetImage()),
		Stamp:       stampOf(from.GetStamp()),
		Tokens:      all(from.GetTokens(), tokenOf),
		Resumptions: int(from.GetResumptions()),
		Images:      all(from.GetImages(), imageInfoOf),
	}
}

func finishOf(from legatov1.FinishReason) FinishReason {
	return FinishReason(word(from.String(), "FINISH_REASON_"))
}

func usageOf(from *legatov1.Usage) Usage {
	if from == nil {
		return Usage{}
	}
	return Usage{from.InputTokens, from.OutputTokens, from.CachedTokens, from.ImageTokens, from.ReasoningTokens}
}

func timingsOf(from *legatov1.Timings) Timings {
	return Timings{
		Queue:      from.GetQueue().AsDuration(),
		Image:      from.GetImage().AsDuration(),
		Prefill:    from.GetPrefill().AsDuration(),
		FirstToken: from.GetFirstToken().AsDuration(),
		Decode:     from.GetDecode().AsDuration(),
		Total:      from.GetTotal().AsDuration(),
	}
}

func imageInfoOf(from *legatov1.ImageInfo) ImageInfo {
	return ImageInfo{from.GetImageId(), int(from.GetWidth()), int(from.GetHeight()), from.GetCacheHit()}
}

func stampOf(from *legatov1.FrameStamp) FrameStamp {
	return FrameStamp{from.GetFrameId(), timeOf(from.GetCaptureTime()), from.GetSequence()}
}

func tokenOf(from *legatov1.Token) Token {
	token := Token{ID: from.TokenId, Text: from.Text, Bytes: from.Bytes, Logprob: from.Logprob}
	if len(from.Alternatives) > 0 {
		token.Alternatives = all(from.Alternatives, alternativeOf)
	}
	if sure := from.Certainty; sure != nil {
		token.Certainty = &Certainty{sure.Existence, sure.Concentration}
	}
	switch value := from.Value.(type) {
	case *legatov1.Token_Coordinate:
		token.Coordinate = &value.Coordinate
	case *legatov1.Token_Size:
		token.Size = &Size{value.Size.GetWidth(), value.Size.GetHeight()}
	}
	return token
}

func alternativeOf(from *legatov1.TokenAlternative) Alternative {
	return Alternative{from.TokenId, from.Text, from.Logprob, from.Bytes}
}

// word is an enum's value without its prefix; empty for UNSPECIFIED, a number for what is newer than this package.
func word(name, prefix string) string {
	if name = strings.TrimPrefix(name, prefix); name == "UNSPECIFIED" {
		return ""
	}
	return name
}

func timestamp(at time.Time) *timestamppb.Timestamp {
	if at.IsZero() {
		return nil
	}
	return timestamppb.New(at)
}

func timeOf(from *timestamppb.Timestamp) time.Time {
	if from == nil {
		return time.Time{}
	}
	return from.AsTime()
}

// duration is absent for 0.
func duration(of time.Duration) *durationpb.Duration {
	if of == 0 {
		return nil
	}
	return durationpb.New(of)
}

func all[From, To any](from []From, convert func(From) To) []To {
	to := make([]To, len(from))
	for i, one := range from {
		to[i] = convert(one)
	}
	return to
}
