package legato

import (
	"errors"
	"slices"
	"testing"
	"time"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

type (
	sent      = legatov1.GenerateResponse
	answering = grpc.ServerStreamingServer[legatov1.GenerateResponse]
)

func begun() *sent {
	return &sent{
		Event:      &legatov1.GenerateResponse_Started{Started: &legatov1.Started{RequestId: "r-1", Model: "fake"}},
		Checkpoint: &legatov1.Checkpoint{Model: "fake", Seed: new(uint64)},
	}
}

func said(text string, tokens ...uint32) *sent {
	message := &sent{Event: &legatov1.GenerateResponse_Text{Text: &legatov1.TextDelta{Text: text}}}
	if len(tokens) > 0 {
		message.Checkpoint = &legatov1.Checkpoint{TokenIds: tokens}
	}
	return message
}

func ended() *sent {
	return &sent{Event: &legatov1.GenerateResponse_Finished{Finished: &legatov1.Finished{}}}
}

// lives is a server that is lost with each of the streams, but for the last one.
func lives(code codes.Code, streams ...[]*sent) *fake {
	server, next := &fake{}, 0
	server.generate = func(stream answering) error {
		mine := min(next, len(streams)-1)
		next++
		for index, message := range streams[mine] {
			message.Index = uint64(index)
			if err := stream.Send(message); err != nil {
				return err
			}
		}
		if mine == len(streams)-1 {
			return nil
		}
		return status.Error(code, "lost")
	}
	return server
}

// soon has resumptions wait as good as nothing.
func soon(t *testing.T) {
	t.Helper()
	before := resumptionDelays
	resumptionDelays = slices.Repeat([]time.Duration{time.Millisecond}, 3)
	t.Cleanup(func() { resumptionDelays = before })
}

func heard(t *testing.T, client *Client) (words []string, started int, err error) {
	t.Helper()
	for event, failure := range client.Generate(t.Context(), nil, QueryTask("?")) {
		switch event := event.(type) {
		case *TextDelta:
			words = append(words, event.Text)
		case *Started:
			started++
		}
		err = failure
	}
	return words, started, err
}

// A stream goes on with what its checkpoints say; nothing is told twice, and what was not covered is told again.
func TestALostStreamGoesOn(t *testing.T) {
	soon(t)
	for _, code := range []codes.Code{codes.Unavailable, codes.Internal, codes.Unknown} {
		server := lives(code,
			[]*sent{begun(), said("one", 1, 2), said(" two"), said(" three", 3), said(" uncovered")},
			[]*sent{begun(), said(" four", 4)},
			[]*sent{begun(), said(" five", 5), ended()})
		words, started, err := heard(t, server.dial(t))
		if err != nil || started != 1 || !slices.Equal(words, []string{"one", " two", " three", " four", " five"}) {
			t.Errorf("%v: got %q, %d starts, %v", code, words, started, err)
		}
		if first := server.asked[0]; !first.Checkpoints || first.ResumeFrom != nil {
			t.Errorf("got %v", first)
		}
		last := server.asked[2]
		if from := last.ResumeFrom; from.Model != "fake" || !slices.Equal(from.TokenIds, []uint32{1, 2, 3, 4}) {
			t.Errorf("got %v", from)
		}
		if last.Options.RequestId != "r-1" {
			t.Errorf("got id %q", last.Options.RequestId)
		}
	}
}

// The fourth loss is the caller's, and so is the first where the server sends no checkpoints.
func TestResumptionsEnd(t *testing.T) {
	soon(t)
	lost := []*sent{begun(), said("a", 1)}
	server := lives(codes.Unavailable, lost, lost, lost, lost, nil)
	if _, _, err := heard(t, server.dial(t)); !errors.Is(err, ErrUnavailable) || len(server.asked) != 4 {
		t.Errorf("got %v after %d", err, len(server.asked))
	}
	without := begun()
	without.Checkpoint = nil
	server = lives(codes.Unavailable, []*sent{without, said("a")}, nil)
	if words, _, err := heard(t, server.dial(t)); !errors.Is(err, ErrUnavailable) || len(words) != 1 {
		t.Errorf("got %q, %v", words, err)
	}
	if len(server.asked) != 1 {
		t.Errorf("asked %d times", len(server.asked))
	}
}
