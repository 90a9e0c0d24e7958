package legato

import (
	"strings"
	"time"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

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
