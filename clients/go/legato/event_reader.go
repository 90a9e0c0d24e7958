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
