package legato

import (
	"context"
	"iter"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
)

// Generate runs one task and yields what it gives while it decodes, [Finished] last. An error ends the stream. Leaving
// the loop cancels the request; so does cancelling the context.
//
// When the server is lost, another one of the same name goes on, up to three times within the deadline; nothing is
// told twice. A picture that only the lost server held is [ReasonImageNotFound].
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
		reader := eventReader{yield: yield}
		for attempt := 1; ; attempt++ {
			failure := reader.replay(c.inference.Generate(ctx, request))
			if failure == nil {
				return
			}
			again := reader.resumes(ctx, failure, request)
			if !again && !reader.begun {
				again = waitIfBusy(ctx, failure, attempt)
			}
			if !again {
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
	request := &legatov1.GenerateRequest{
		Image: picture, Task: tasks[0], Options: call.options, Stamp: call.stamp, Checkpoints: true,
	}
	return request, c.fits(request)
}
