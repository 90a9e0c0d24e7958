package legato

import (
	"context"
	"errors"
	"io"
	"iter"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
	"google.golang.org/grpc"
)

// Generate runs one task and yields what it gives while it decodes, [Finished] last. An error ends the stream. Leaving
// the loop cancels the request; so does cancelling the context.
//
//	for event, err := range client.Generate(ctx, image, legato.CaptionTask(legato.ShortCaption)) {
//		if err != nil {
//			return err
//		}
//		if text, ok := event.(*legato.TextDelta); ok {
//			fmt.Print(text.Text)
//		}
//	}
func (c *Client) Generate(
	ctx context.Context, image Image, task Task, options ...CallOption,
) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		call := callOf(options)
		request, err := c.generateRequest(image, task, call)
		call.stayWith(request.GetImage())
		if err != nil {
			yield(nil, err)
			return
		}
		ctx, cancel := withDeadline(outgoing(ctx, call), c.settings.streamTimeout)
		defer cancel()
		for attempt := 1; ; attempt++ {
			reader := eventReader{yield: yield}
			failure := reader.replay(c.inference.Generate(ctx, request))
			if failure == nil {
				return
			}
			if reader.next > 0 || !waitIfBusy(ctx, failure, attempt) {
				yield(nil, failure)
				return
			}
		}
	}
}

func (c *Client) generateRequest(image Image, task Task, call callSettings) (*legatov1.GenerateRequest, error) {
	tasks, err := messagesOf([]Task{task})
	if err != nil {
		return nil, err
	}
	picture, err := load(image)
	if err != nil {
		return nil, err
	}
	request := &legatov1.GenerateRequest{Image: picture, Task: tasks[0], Options: call.options, Stamp: call.stamp}
	return request, c.fits(request)
}

// eventReader yields a stream's events, and sees that none is missing.
type eventReader struct {
	yield    func(Event, error) bool
	next     uint64
	finished *Finished // kept for the end: nothing is running any more when a caller has it
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
		event := eventOf(message)
		if finished, ok := event.(*Finished); ok {
			r.finished = finished
		} else if event != nil && !r.yield(event, nil) {
			return nil
		}
	}
}

func (r *eventReader) end() *Error {
	if r.finished == nil {
		return incomplete("the stream ended before its answer was finished")
	}
	r.yield(r.finished, nil)
	return nil
}
