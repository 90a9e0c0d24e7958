package legato_test

import (
	"context"
	"errors"
	"image"
	"image/color"
	"io"
	"os"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/legato-vlm/legato/clients/go/legato"
	"google.golang.org/grpc"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
)

// These tests ask a real server, named by LEGATO_SERVER; whatever model it serves.

func dial(t *testing.T) *legato.Client {
	t.Helper()
	address := os.Getenv("LEGATO_SERVER")
	if address == "" {
		t.Skip("needs a server: LEGATO_SERVER=host:port")
	}
	client, err := legato.Dial(address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

func need(t *testing.T, client *legato.Client, capability string) {
	t.Helper()
	info, err := client.ServerInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !info.Can(capability) {
		t.Skip("the server lacks the capability " + capability)
	}
}

// scene is a red square on white.
func scene() *image.RGBA {
	picture := image.NewRGBA(image.Rect(0, 0, 64, 48))
	for i := range picture.Pix {
		picture.Pix[i] = 255
	}
	for x := 10; x < 30; x++ {
		for y := 10; y < 30; y++ {
			picture.SetRGBA(x, y, color.RGBA{255, 0, 0, 255})
		}
	}
	return picture
}

var picture = legato.Picture(scene())

func failed(t *testing.T, err error, reason legato.Reason) *legato.Error {
	t.Helper()
	var failure *legato.Error
	if !errors.As(err, &failure) || failure.Reason != reason {
		t.Fatalf("got %v, want %s", err, reason)
	}
	return failure
}

// Every skill answers with its own type, about the picture that was sent, under the id that was given.
func TestSkills(t *testing.T) {
	client, ctx := dial(t), t.Context()
	stamp := legato.FrameStamp{FrameID: "front", CaptureTime: time.Unix(1_700_000_000, 123).UTC(), Sequence: 7}
	common := []legato.Option{legato.WithRequestID("go-" + t.Name()), legato.WithStamp(stamp)}
	detected, err := client.Detect(ctx, picture, "square", append(common, legato.WithMaxObjects(3))...)
	if err != nil {
		t.Fatal(err)
	}
	info := detected.Info
	if info.RequestID != "go-"+t.Name() || info.Model == "" || info.Finish == "" || info.Usage.Output == 0 {
		t.Errorf("got %+v", info)
	}
	if width, height := info.Image.Size(); width != 64 || height != 48 {
		t.Errorf("got %+v", info.Image)
	}
	if info.Stamp != stamp {
		t.Errorf("got %+v, want %+v", info.Stamp, stamp)
	}
	for _, object := range detected.Objects {
		if object.Label != "square" || !object.Box.Pixels(64, 48).In(image.Rect(0, 0, 64, 48)) {
			t.Errorf("got %+v", object)
		}
	}
	if _, err := client.Point(ctx, picture, "square"); err != nil {
		t.Error(err)
	}
	if _, err := client.Segment(ctx, picture, "square", legato.WithRefs(legato.Point{X: 0.3, Y: 0.4})); err != nil {
		t.Error(err)
	}
	short := legato.WithMaxTokens(4)
	if caption, err := client.Caption(ctx, picture, legato.ShortCaption, short); err != nil || caption.Caption == "" {
		t.Errorf("got %+v, %v", caption, err)
	}
	if answer, err := client.Query(ctx, nil, "Why?", short); err != nil || answer.Info.Usage.Output > 4 {
		t.Errorf("got %+v, %v", answer, err)
	}
}

// Every token is returned on request, with its probability on request: unary, in a stream, and task by task.
func TestTokens(t *testing.T) {
	client, ctx := dial(t), t.Context()
	need(t, client, "logprobs")
	caption, err := client.Caption(ctx, picture, legato.ShortCaption, legato.WithLogprobs())
	if err != nil {
		t.Fatal(err)
	}
	count := int(caption.Info.Usage.Output)
	if len(caption.Info.Tokens) != count {
		t.Errorf("got %+v", caption.Info)
	}
	for _, token := range caption.Info.Tokens {
		if token.Logprob == nil || *token.Logprob > 0 {
			t.Errorf("got %+v", token)
		}
	}
	told, task := 0, legato.CaptionTask(legato.ShortCaption)
	for event, err := range client.Generate(ctx, picture, task, legato.WithTokens()) {
		switch one := event.(type) {
		case nil:
			t.Fatal(err)
		case *legato.TextDelta:
			told += len(one.Tokens)
		case *legato.TokensDelta:
			told += len(one.Tokens)
		case *legato.Finished:
			if tokens := one.Info.Tokens; len(tokens) != told || told != count || tokens[0].Logprob != nil {
				t.Errorf("told %d, got %+v", told, tokens)
			}
		}
	}
	both := []legato.Task{task, legato.DetectTask("square")}
	tasks, err := client.RunTasks(ctx, picture, both, legato.WithTokens())
	if err != nil {
		t.Fatal(err)
	}
	words, boxes := tasks.Results[0].Result.(*legato.CaptionResult), tasks.Results[1].Result.(*legato.DetectResult)
	if len(words.Info.Tokens) != count || len(boxes.Info.Tokens) != int(boxes.Info.Usage.Output) {
		t.Errorf("got %+v, %+v", words.Info, boxes.Info)
	}
}

// A conversation is answered at its end, whole or in a stream; one out of order is refused.
func TestConversations(t *testing.T) {
	client, ctx := dial(t), t.Context()
	messages := []legato.Message{
		legato.UserMessage("What is it?"), legato.AssistantMessage("A square."), legato.UserMessage("Of what colour?"),
	}
	answer, err := client.Chat(ctx, picture, messages, legato.WithMaxTokens(4))
	if err != nil {
		t.Fatal(err)
	}
	for event, err := range client.Generate(ctx, picture, legato.ChatTask(messages, legato.WithMaxTokens(4))) {
		if err != nil {
			t.Fatal(err)
		}
		if finished, ok := event.(*legato.Finished); ok {
			if streamed := finished.Result.(*legato.QueryResult); streamed.Answer != answer.Answer {
				t.Errorf("got %q and %q", answer.Answer, streamed.Answer)
			}
		}
	}
	_, err = client.Chat(ctx, nil, messages[1:])
	failure := failed(t, err, legato.ReasonInvalidField)
	if failure.Metadata["field"] != "messages[0].role" {
		t.Errorf("got %+v", failure)
	}
}

// A bad request says which field is wrong.
func TestErrorsOfTheServer(t *testing.T) {
	client, ctx := dial(t), t.Context()
	_, err := client.Detect(ctx, picture, "square", legato.WithTopP(2), legato.WithRequestID("go-bad"))
	failure := failed(t, err, legato.ReasonInvalidField)
	if failure.Metadata["field"] != "sampling.top_p" || failure.FieldViolations[0].Field != "sampling.top_p" {
		t.Errorf("got %+v", failure)
	}
	if failure.RequestID != "go-bad" || !errors.Is(err, legato.ErrInvalidArgument) {
		t.Errorf("got %+v", failure)
	}
	_, err = client.Detect(ctx, picture, "square", legato.WithModel("nobody"))
	if failed(t, err, legato.ReasonModelNotFound); !errors.Is(err, legato.ErrNotFound) {
		t.Errorf("got %v", err)
	}
	_, err = client.Detect(ctx, legato.Bytes([]byte("no picture")), "square")
	failed(t, err, legato.ReasonImageUndecodable)
	_, err = client.Detect(ctx, legato.Held("nothing"), "square")
	failed(t, err, legato.ReasonImageNotFound)
}

// A passed deadline and a cancelled call are those of the context.
func TestContexts(t *testing.T) {
	client := dial(t)
	past, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
	defer cancel()
	if _, err := client.Detect(past, picture, "square"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := client.Detect(gone, picture, "square"); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// A stream begins with Started and ends with Finished, whose result its deltas add up to.
func TestGenerate(t *testing.T) {
	client := dial(t)
	var events []legato.Event
	var text strings.Builder
	for event, err := range client.Generate(t.Context(), picture, legato.CaptionTask(legato.NormalCaption)) {
		if err != nil {
			t.Fatal(err)
		}
		if delta, ok := event.(*legato.TextDelta); ok {
			text.WriteString(delta.Text)
		}
		events = append(events, event)
	}
	finished, ok := events[len(events)-1].(*legato.Finished)
	if !ok {
		t.Fatalf("got %T", events[len(events)-1])
	}
	if caption := finished.Result.(*legato.CaptionResult); caption.Caption != text.String() || text.Len() == 0 {
		t.Errorf("%q, in pieces %q", caption.Caption, text.String())
	}
	var objects []*legato.Detection
	for event, err := range client.Generate(t.Context(), picture, legato.DetectTask("square")) {
		if err != nil {
			t.Fatal(err)
		}
		switch event := event.(type) {
		case *legato.Detection:
			objects = append(objects, event)
		case *legato.Finished:
			whole := event.Result.(*legato.DetectResult).Objects
			if len(whole) != len(objects) || len(whole) > 0 && !reflect.DeepEqual(whole, objects) {
				t.Errorf("got %v, in pieces %v", whole, objects)
			}
		}
	}
}

// A task that fails leaves its siblings alone: without a picture a question is answered, a detection is not.
func TestRunTasks(t *testing.T) {
	client := dial(t)
	answer, err := client.RunTasks(t.Context(), nil, []legato.Task{
		legato.DetectTask("square", legato.WithTaskID("boxes")),
		legato.QueryTask("Why?", legato.WithTaskID("words"), legato.WithMaxTokens(3)),
	})
	if err != nil {
		t.Fatal(err)
	}
	boxes, words := answer.Results[0], answer.Results[1]
	if failed(t, boxes.Err, legato.ReasonInvalidField); boxes.Result != nil || boxes.TaskID != "boxes" {
		t.Errorf("got %+v", boxes)
	}
	if _, ok := words.Result.(*legato.QueryResult); !ok || words.Err != nil || words.TaskID != "words" {
		t.Errorf("got %+v", words)
	}
}

// The server tells what it is and what it serves.
func TestServerInfo(t *testing.T) {
	client := dial(t)
	info, err := client.ServerInfo(t.Context())
	if err != nil || info.Name != "legato" || info.Limits.MaxRequestBytes == 0 || info.Limits.DefaultDeadline == 0 {
		t.Errorf("got %+v, %v", info, err)
	}
	models, err := client.Models(t.Context())
	if err != nil || len(models) == 0 || len(models[0].Tasks) == 0 {
		t.Errorf("got %+v, %v", models, err)
	}
}

// A picture that was put can be asked about until it is deleted.
func TestHeldImages(t *testing.T) {
	client, ctx := dial(t), t.Context()
	need(t, client, "images")
	held, err := client.PutImage(ctx, picture, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if held.Width != 64 || held.ImageID == "" || time.Until(held.ExpireTime) <= 0 {
		t.Errorf("got %+v", held)
	}
	found, err := client.Detect(ctx, legato.Held(held.ImageID), "square")
	if err != nil || found.Info.Image.ImageID != held.ImageID {
		t.Errorf("got %+v, %v", found, err)
	}
	if err := client.DeleteImage(ctx, held.ImageID); err != nil {
		t.Error(err)
	}
	failed(t, client.DeleteImage(ctx, held.ImageID), legato.ReasonImageNotFound)
	if _, err := client.PutImage(ctx, legato.Held("a"), 0); !errors.Is(err, legato.ErrInvalidArgument) {
		t.Errorf("got %v", err)
	}
}

// Each frame of a session gets its results, the last marked, under its own stamp; half-close ends the session well.
func TestSessions(t *testing.T) {
	client := dial(t)
	need(t, client, "sessions")
	config := legato.SessionConfig{Name: "go", Tasks: []legato.Task{
		legato.DetectTask("square", legato.WithTaskID("boxes")),
		legato.CaptionTask(legato.ShortCaption, legato.WithTaskID("words"), legato.WithMaxTokens(3)),
	}}
	session, err := client.OpenSession(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	const frames = 3
	sent := make([]legato.FrameStamp, frames)
	for i := range sent {
		at := time.Now().Truncate(time.Microsecond).UTC()
		sent[i] = legato.FrameStamp{FrameID: "front", CaptureTime: at, Sequence: uint64(10 + i)}
	}
	var writer sync.WaitGroup
	writer.Go(func() {
		for _, stamp := range sent {
			if _, err := session.Send(legato.Frame{Stamp: stamp, Image: picture, MustRun: true}); err != nil {
				t.Error(err)
			}
		}
		if err := session.CloseSend(); err != nil {
			t.Error(err)
		}
	})
	results, last := map[legato.FrameStamp]int{}, 0
	for {
		event, err := session.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if result, ok := event.(*legato.FrameResult); ok {
			if results[result.Stamp]++; result.Err != nil {
				t.Errorf("got %+v", result)
			}
			if result.Last {
				last++
			}
		}
	}
	writer.Wait()
	for _, stamp := range sent {
		if results[stamp] != len(config.Tasks) {
			t.Errorf("%+v: %d results", stamp, results[stamp])
		}
	}
	if len(results) != frames || last != frames {
		t.Errorf("%d frames answered, %d of them to the end", len(results), last)
	}
}

// A stream whose server is killed after its first word goes on with another one: its words are those of a run without a
// loss, each told once. LEGATO_LOST_SERVER=host:port, slow, and LEGATO_LOST_PID name the server that is killed.
func TestLostServer(t *testing.T) {
	lost, pid, other := os.Getenv("LEGATO_LOST_SERVER"), os.Getenv("LEGATO_LOST_PID"), os.Getenv("LEGATO_SERVER")
	if lost == "" || other == "" {
		t.Skip("needs a server to kill and another one")
	}
	task := legato.QueryTask("How many?", legato.WithMaxTokens(60))
	expected, _ := listen(t, dial(t), task, nil)

	servers := manual.NewBuilderWithScheme("servers")
	servers.InitialState(addresses(lost))
	client, err := legato.Dial("servers:///both", legato.WithGRPC(grpc.WithResolvers(servers)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	words, last := listen(t, client, task, func() {
		servers.UpdateState(addresses(other)) // new streams go there; this one stays where it is
		kill(t, pid)
	}, legato.WithRequestID("robot-1"))
	answer := last.Result.(*legato.QueryResult).Answer
	if told := strings.Join(words, ""); told != strings.Join(expected, "") || told != answer {
		t.Errorf("got %q, the answer %q", words, answer)
	}
	if info := last.Info; info.Resumptions != 1 || info.RequestID != "robot-1" || info.Usage.Output != 60 {
		t.Errorf("got %+v", info)
	}
}

func addresses(each ...string) (state resolver.State) {
	for _, address := range each {
		state.Addresses = append(state.Addresses, resolver.Address{Addr: address})
	}
	return state
}

func kill(t *testing.T, pid string) {
	t.Helper()
	number, err := strconv.Atoi(pid)
	if err != nil {
		t.Fatal(err)
	}
	process, err := os.FindProcess(number)
	if err != nil {
		t.Fatal(err)
	}
	if err := process.Kill(); err != nil {
		t.Fatal(err)
	}
}

// listen returns the words of a stream and its end; afterFirst is called once.
func listen(
	t *testing.T, client *legato.Client, task legato.Task, afterFirst func(), options ...legato.CallOption,
) (words []string, last *legato.Finished) {
	t.Helper()
	for event, err := range client.Generate(t.Context(), nil, task, options...) {
		if err != nil {
			t.Fatal(err)
		}
		switch event := event.(type) {
		case *legato.TextDelta:
			words = append(words, event.Text)
			if len(words) == 1 && afterFirst != nil {
				afterFirst()
			}
		case *legato.Finished:
			last = event
		}
	}
	return words, last
}
