package legato

import (
	"context"
	"errors"
	"time"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

// Client calls the servers of one name. Its methods may be called by any number of goroutines.
type Client struct {
	settings  dialSettings
	work      *grpc.ClientConn
	about     *grpc.ClientConn // asks what is not healthy yet, too; opens at its first call
	inference legatov1.InferenceServiceClient
	images    legatov1.ImageServiceClient
	sessions  legatov1.SessionServiceClient
	server    legatov1.ServerServiceClient
}

// Dial makes a client of any gRPC target: "host:port", "dns:///name:port", "unix:/path". Nothing is sent before the
// first call; a URL, or a host without a port, is an error at once.
func Dial(target string, options ...DialOption) (*Client, error) {
	if err := checkTarget(target); err != nil {
		return nil, err
	}
	settings := dialSettingsOf(options)
	work, err := settings.connect(target)
	if err != nil {
		return nil, err
	}
	about, err := settings.connect(target, grpc.WithDisableHealthCheck())
	if err != nil {
		work.Close()
		return nil, err
	}
	return &Client{
		settings:  settings,
		work:      work,
		about:     about,
		inference: legatov1.NewInferenceServiceClient(work),
		images:    legatov1.NewImageServiceClient(work),
		sessions:  legatov1.NewSessionServiceClient(work),
		server:    legatov1.NewServerServiceClient(about),
	}, nil
}

// Close ends running calls and the connections.
func (c *Client) Close() error {
	return errors.Join(c.work.Close(), c.about.Close())
}

// Conn is the connection, for the contract's own stubs.
func (c *Client) Conn() grpc.ClientConnInterface { return c.work }

// RunTasks does several things, 1 to 32, with one picture, which is encoded once. A task that fails says so in its
// result; the error is for what all tasks share.
func (c *Client) RunTasks(
	ctx context.Context, image Image, tasks []Task, options ...CallOption,
) (*TasksResult, error) {
	call := callOf(options)
	messages, err := messagesOf(tasks)
	if err != nil {
		return nil, err
	}
	picture, err := load(image)
	if err != nil {
		return nil, err
	}
	call.stayWith(picture)
	request := &legatov1.RunTasksRequest{Image: picture, Tasks: messages, Options: call.options, Stamp: call.stamp}
	return invoke(outgoing(ctx, call), c, c.inference.RunTasks, request, tasksOf)
}

// ask is a call of one skill: its task, its picture, and what the options added.
type ask struct {
	callSettings
	task  *legatov1.Task
	image *legatov1.Image
}

func askOf(image Image, task Task, options []Option) (ask, error) {
	wanted := settings{task: task, call: callOf(nil)}
	for _, option := range options {
		option.apply(&wanted)
	}
	if wanted.task.wrong != nil {
		return ask{}, wanted.task.wrong
	}
	picture, err := load(image)
	wanted.call.stayWith(picture)
	return ask{wanted.call, wanted.task.message, picture}, err
}

func callOf(options []CallOption) callSettings {
	wanted := settings{call: callSettings{options: &legatov1.RequestOptions{}}}
	for _, option := range options {
		option.apply(&wanted)
	}
	return wanted.call
}

// outgoing is the context of a call with the metadata that its options added.
func outgoing(ctx context.Context, call callSettings) context.Context {
	if call.header == nil {
		return ctx
	}
	return withHeader(ctx, call.header)
}

// invoke makes a unary call, by its deadline and for as long as a busy server says when to come back.
func invoke[Request proto.Message, Answer, Value any](
	ctx context.Context,
	c *Client,
	call func(context.Context, Request, ...grpc.CallOption) (Answer, error),
	request Request,
	read func(Answer) Value,
) (value Value, err error) {
	if err := c.fits(request); err != nil {
		return value, err
	}
	ctx, cancel := withDeadline(ctx, c.settings.timeout)
	defer cancel()
	for attempt := 1; ; attempt++ {
		var trailer metadata.MD
		answer, err := call(ctx, request, grpc.Trailer(&trailer))
		if err == nil {
			return read(answer), nil
		}
		failure := errorOf(err, trailer)
		if !waitIfBusy(ctx, failure, attempt) {
			return value, failure
		}
	}
}

// fits refuses an oversize request here, where the error can say so. In the transport it would fail as
// RESOURCE_EXHAUSTED without details, which looks like load.
func (c *Client) fits(request proto.Message) error {
	size, limit := proto.Size(request), c.settings.maxMessageBytes
	if size <= limit {
		return nil
	}
	failure := misuse("image", "the request has %d bytes, the limit is %d: upload the image with PutImage, "+
		"which takes larger ones, and ask about Held; or send it as a JPEG file", size, limit)
	failure.Reason = ReasonImageTooLarge
	return failure
}

// withDeadline gives a context one if it has none.
func withDeadline(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if _, given := ctx.Deadline(); given {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, timeout)
}

// waitIfBusy reports whether to call again, after the time that a busy server asked for. gRPC itself retries
// UNAVAILABLE.
func waitIfBusy(ctx context.Context, failure *Error, attempt int) bool {
	if failure.Code != codes.ResourceExhausted || failure.RetryAfter == 0 || attempt >= maxAttempts {
		return false
	}
	return sleepWithin(ctx, failure.RetryAfter)
}

// sleepWithin reports whether the context outlives the delay; a deadline that does not is not waited for.
func sleepWithin(ctx context.Context, delay time.Duration) bool {
	if deadline, given := ctx.Deadline(); given && time.Until(deadline) <= delay {
		return false
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
