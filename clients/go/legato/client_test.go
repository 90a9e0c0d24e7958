package legato

import (
	"context"
	"errors"
	"net"
	"reflect"
	"testing"
	"time"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

// fake answers as a test says.
type fake struct {
	legatov1.UnimplementedInferenceServiceServer
	legatov1.UnimplementedServerServiceServer
	legatov1.UnimplementedSessionServiceServer
	query    func(context.Context, *legatov1.QueryRequest) (*legatov1.QueryResponse, error)
	detect   func(context.Context, *legatov1.DetectRequest) (*legatov1.DetectResponse, error)
	generate func(grpc.ServerStreamingServer[legatov1.GenerateResponse]) error
	asked    []*legatov1.GenerateRequest
	session  func(grpc.BidiStreamingServer[legatov1.SessionRequest, legatov1.SessionResponse]) error
	health   *health.Server
}

func (f *fake) Detect(
	ctx context.Context, request *legatov1.DetectRequest,
) (*legatov1.DetectResponse, error) {
	return f.detect(ctx, request)
}

func (f *fake) Query(ctx context.Context, request *legatov1.QueryRequest) (*legatov1.QueryResponse, error) {
	return f.query(ctx, request)
}

func (f *fake) Generate(
	request *legatov1.GenerateRequest, stream grpc.ServerStreamingServer[legatov1.GenerateResponse],
) error {
	f.asked = append(f.asked, request)
	return f.generate(stream)
}

func (f *fake) Session(
	stream grpc.BidiStreamingServer[legatov1.SessionRequest, legatov1.SessionResponse],
) error {
	return f.session(stream)
}

func (f *fake) GetServerInfo(
	context.Context, *legatov1.GetServerInfoRequest,
) (*legatov1.GetServerInfoResponse, error) {
	return &legatov1.GetServerInfoResponse{Name: "fake"}, nil
}

func (f *fake) dial(t *testing.T, options ...DialOption) *Client {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	legatov1.RegisterInferenceServiceServer(server, f)
	legatov1.RegisterServerServiceServer(server, f)
	legatov1.RegisterSessionServiceServer(server, f)
	if f.health == nil {
		f.health = health.NewServer()
		f.health.SetServingStatus("legato.v1.InferenceService", grpc_health_v1.HealthCheckResponse_SERVING)
	}
	grpc_health_v1.RegisterHealthServer(server, f.health)
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	client, err := Dial(listener.Addr().String(), options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

var picture = Bytes([]byte("a picture"))

// A server that is full is asked again when it says when; the answer is then the call's.
func TestBusyServersAreAskedAgain(t *testing.T) {
	busy := refusal(t, codes.ResourceExhausted,
		&errdetails.ErrorInfo{Reason: "QUEUE_FULL"},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(time.Millisecond)})
	asked := 0
	server := &fake{
		detect: func(context.Context, *legatov1.DetectRequest) (*legatov1.DetectResponse, error) {
			if asked++; asked < maxAttempts {
				return nil, busy
			}
			return &legatov1.DetectResponse{}, nil
		},
		generate: func(stream grpc.ServerStreamingServer[legatov1.GenerateResponse]) error {
			if asked++; asked < maxAttempts {
				return busy
			}
			return stream.Send(&legatov1.GenerateResponse{Index: 1})
		},
	}
	client := server.dial(t)
	if _, err := client.Detect(t.Context(), picture, "bus"); err != nil || asked != maxAttempts {
		t.Errorf("asked %d times, got %v", asked, err)
	}
	asked = 0
	for range client.Generate(t.Context(), picture, DetectTask("bus")) {
	}
	if asked != maxAttempts {
		t.Errorf("asked %d times", asked)
	}
}

// Nothing is asked again that says no when to come back, that would come back too late, or that was asked often enough.
func TestOtherFailuresAreNotAskedAgain(t *testing.T) {
	exhausted := func(delay time.Duration) error {
		return refusal(t, codes.ResourceExhausted, &errdetails.RetryInfo{RetryDelay: durationpb.New(delay)})
	}
	cases := []struct {
		err  error
		want int
	}{
		{exhausted(time.Millisecond), maxAttempts},
		{exhausted(time.Hour), 1},
		{status.Error(codes.ResourceExhausted, "message too large"), 1},
		{status.Error(codes.InvalidArgument, "no"), 1},
		{status.Error(codes.Unavailable, "starting"), maxAttempts}, // by gRPC's own policy
	}
	for _, c := range cases {
		asked := 0
		server := &fake{detect: func(context.Context, *legatov1.DetectRequest) (*legatov1.DetectResponse, error) {
			asked++
			return nil, c.err
		}}
		_, err := server.dial(t).Detect(t.Context(), picture, "bus")
		if want := status.Code(c.err); status.Code(err) != want || asked != c.want {
			t.Errorf("%v: asked %d times, got %v", c.err, asked, err)
		}
	}
}

// A call without a deadline gets one, which the server sees together with the caller's metadata.
func TestWhatEveryCallCarries(t *testing.T) {
	var sent metadata.MD
	var left time.Duration
	server := &fake{detect: func(ctx context.Context, _ *legatov1.DetectRequest) (*legatov1.DetectResponse, error) {
		sent, _ = metadata.FromIncomingContext(ctx)
		deadline, _ := ctx.Deadline()
		left = time.Until(deadline)
		return &legatov1.DetectResponse{}, nil
	}}
	client := server.dial(t, WithTimeout(time.Hour), WithToken("secret"))
	ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-1-2-01")
	_, err := client.Detect(ctx, picture, "bus", WithPriority(3), WithTenant("lab"), WithMaxObjects(1))
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]string{
		"authorization": "Bearer secret", "legato-client": "go/" + Version, "traceparent": "00-1-2-01",
		"legato-priority": "3", "legato-tenant": "lab",
	} {
		if got := sent.Get(key); len(got) != 1 || got[0] != want {
			t.Errorf("%s: got %v", key, got)
		}
	}
	if left <= 59*time.Minute || left > time.Hour {
		t.Errorf("%v left", left)
	}
	if got := sent.Get("legato-affinity"); len(got) != 0 {
		t.Errorf("a picture in the call has the affinity %v", got)
	}
	if _, err := client.Detect(ctx, Held("img_1"), "bus"); err != nil {
		t.Fatal(err)
	}
	if got := sent.Get("legato-affinity"); len(got) != 1 || got[0] != "img_1" {
		t.Errorf("a picture that the server holds has the affinity %v", got)
	}
}

// A conversation is a query whose messages stand in place of the question.
func TestChat(t *testing.T) {
	var asked *legatov1.QueryRequest
	server := &fake{query: func(_ context.Context, request *legatov1.QueryRequest) (*legatov1.QueryResponse, error) {
		asked = request
		return &legatov1.QueryResponse{Answer: "red"}, nil
	}}
	messages := []Message{
		SystemMessage("Be short."), UserMessage("What is it?"), AssistantMessage("A cup."), UserMessage("Which colour?"),
	}
	answer, err := server.dial(t).Chat(t.Context(), picture, messages, WithReasoning(), WithMaxTokens(3))
	if err != nil || answer.Answer != "red" {
		t.Fatalf("got %+v, %v", answer, err)
	}
	if asked.Question != "" || !asked.Reasoning || asked.Sampling.GetMaxTokens() != 3 || asked.Image == nil {
		t.Errorf("got %v", asked)
	}
	for i, want := range []string{"SYSTEM Be short.", "USER What is it?", "ASSISTANT A cup.", "USER Which colour?"} {
		message := asked.Messages[i]
		if got := word(message.Role.String(), "CHAT_ROLE_") + " " + message.Parts[0].GetText(); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

// Several images go with a query, in order, with the times of frames and their places among the words.
func TestSeveralImages(t *testing.T) {
	var asked *legatov1.QueryRequest
	server := &fake{query: func(_ context.Context, request *legatov1.QueryRequest) (*legatov1.QueryResponse, error) {
		asked = request
		info := &legatov1.ResponseInfo{Images: []*legatov1.ImageInfo{{ImageId: "a"}, {ImageId: "b"}}}
		return &legatov1.QueryResponse{Info: info}, nil
	}}
	images := WithImages(Held("img_1"), ClipFrame(Bytes([]byte("file")), 1500*time.Millisecond))
	messages := []Message{UserParts(Words("One:"), Shown(), Words("two:"), Shown())}
	answer, err := server.dial(t).Chat(t.Context(), nil, messages, images, WithChoices("one", "two"))
	if err != nil || len(answer.Info.Images) != 2 || answer.Info.Images[1].ImageID != "b" {
		t.Fatalf("got %+v, %v", answer, err)
	}
	if asked.Image != nil || asked.Images[0].Image.GetImageId() != "img_1" || asked.Images[0].Time != nil {
		t.Errorf("got %v", asked)
	}
	second := asked.Images[1]
	if string(second.Image.GetEncoded().GetData()) != "file" || second.Time.AsDuration() != 1500*time.Millisecond {
		t.Errorf("got %v", second)
	}
	if parts := asked.Messages[0].Parts; len(parts) != 4 || parts[0].GetText() != "One:" || parts[3].GetImage() == nil {
		t.Errorf("got %v", parts)
	}
	if got := asked.ResponseFormat.GetChoices().GetTexts(); !reflect.DeepEqual(got, []string{"one", "two"}) {
		t.Errorf("got %v", got)
	}
	if _, err := server.dial(t).Detect(t.Context(), picture, "bus", images); err == nil {
		t.Error("a detection takes several images")
	}
	if _, err := server.dial(t).Query(t.Context(), nil, "Which?", WithImages(File("/no/such/file"))); err == nil {
		t.Error("an image that cannot be read is no error")
	}
}

// Tokens are typed: what one does not carry is nil, not 0.
func TestTokensAreTyped(t *testing.T) {
	half := float32(-0.5)
	tokens := []*legatov1.Token{
		{TokenId: 9, Text: "hi", Logprob: &half},
		{TokenId: 5, Value: &legatov1.Token_Coordinate{}},
		{TokenId: 6, Value: &legatov1.Token_Size{Size: &legatov1.Size{Width: 0.5, Height: 0.25}}},
	}
	server := &fake{detect: func(context.Context, *legatov1.DetectRequest) (*legatov1.DetectResponse, error) {
		return &legatov1.DetectResponse{Info: &legatov1.ResponseInfo{Tokens: tokens}}, nil
	}}
	detected, err := server.dial(t).Detect(t.Context(), picture, "bus", WithTokens())
	if err != nil {
		t.Fatal(err)
	}
	zero := float32(0)
	want := []Token{
		{ID: 9, Text: "hi", Logprob: &half},
		{ID: 5, Coordinate: &zero},
		{ID: 6, Size: &Size{0.5, 0.25}},
	}
	if !reflect.DeepEqual(detected.Info.Tokens, want) {
		t.Errorf("got %+v", detected.Info.Tokens)
	}
}

// Alternatives and certainties are told where they were sent; what asks for them, a filter and an order are sent.
func TestConfidencesAreAskedForAndTold(t *testing.T) {
	var asked *legatov1.DetectRequest
	sure := float32(0.75)
	token := &legatov1.Token{
		TokenId:      5,
		Certainty:    &legatov1.TokenCertainty{Existence: 0.5, Concentration: 0.25},
		Alternatives: []*legatov1.TokenAlternative{{TokenId: 7, Text: "or", Logprob: -1, Bytes: []byte("or")}},
	}
	server := &fake{detect: func(_ context.Context, request *legatov1.DetectRequest) (*legatov1.DetectResponse, error) {
		asked = request
		return &legatov1.DetectResponse{
			Objects: []*legatov1.DetectedObject{{Confidence: &sure}},
			Info:    &legatov1.ResponseInfo{Tokens: []*legatov1.Token{token}},
		}, nil
	}}
	detected, err := server.dial(t).Detect(
		t.Context(), picture, "bus", WithMinConfidence(0.5), WithOrder(OrderConfidence), WithAlternatives(3),
	)
	if err != nil {
		t.Fatal(err)
	}
	if asked.GetMinConfidence() != 0.5 || asked.Order != legatov1.ObjectOrder_OBJECT_ORDER_CONFIDENCE {
		t.Errorf("asked for %v and %v", asked.GetMinConfidence(), asked.Order)
	}
	if asked.Options.GetTopLogprobs() != 3 || *detected.Objects[0].Confidence != sure {
		t.Errorf("asked for %d, got %v", asked.Options.GetTopLogprobs(), detected.Objects[0].Confidence)
	}
	want := []Token{{ID: 5, Certainty: &Certainty{0.5, 0.25}, Alternatives: []Alternative{{7, "or", -1, []byte("or")}}}}
	if !reflect.DeepEqual(detected.Info.Tokens, want) {
		t.Errorf("got %+v", detected.Info.Tokens)
	}
}

// The server is told the deadline of the context, and a call that it outlasts ends with it.
func TestDeadlines(t *testing.T) {
	told := make(chan time.Time, 2)
	wait := func(ctx context.Context) error {
		deadline, _ := ctx.Deadline()
		told <- deadline
		<-ctx.Done()
		return ctx.Err()
	}
	server := &fake{
		detect: func(ctx context.Context, _ *legatov1.DetectRequest) (*legatov1.DetectResponse, error) {
			return nil, wait(ctx)
		},
		generate: func(stream grpc.ServerStreamingServer[legatov1.GenerateResponse]) error {
			return wait(stream.Context())
		},
	}
	client := server.dial(t)
	for name, call := range map[string]func(context.Context) error{
		"Detect": func(ctx context.Context) error {
			_, err := client.Detect(ctx, picture, "bus")
			return err
		},
		"Generate": func(ctx context.Context) error {
			for _, err := range client.Generate(ctx, picture, DetectTask("bus")) {
				if err != nil {
					return err
				}
			}
			return nil
		},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		err := call(ctx)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: got %v", name, err)
		}
		wanted, _ := ctx.Deadline()
		if deadline := <-told; deadline.IsZero() || deadline.Sub(wanted).Abs() > time.Minute {
			t.Errorf("%s: the server was told %v", name, deadline)
		}
	}
}

// A request that is too large, or an option of another task, is refused before it is sent.
func TestWhatIsRefusedUnsent(t *testing.T) {
	client := (&fake{}).dial(t, WithMaxMessageBytes(1000))
	large := Bytes(make([]byte, 2000))
	_, err := client.Detect(t.Context(), large, "bus")
	if !errors.Is(err, ReasonImageTooLarge) {
		t.Errorf("got %v", err)
	}
	for _, err := range client.Generate(t.Context(), large, DetectTask("bus")) {
		if !errors.Is(err, ReasonImageTooLarge) {
			t.Errorf("got %v", err)
		}
	}
	_, err = client.Caption(t.Context(), picture, ShortCaption, WithMaxObjects(1))
	if !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("got %v", err)
	}
	_, err = client.RunTasks(t.Context(), picture, []Task{{}})
	if !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("got %v", err)
	}
}

// Work goes only to a server that says it can do it; what a server is, is told before.
func TestUnhealthyServersAreLeftAlone(t *testing.T) {
	server := &fake{health: health.NewServer()}
	server.health.SetServingStatus("legato.v1.InferenceService", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	client := server.dial(t)
	if _, err := client.Detect(t.Context(), picture, "bus"); !errors.Is(err, ErrUnavailable) {
		t.Errorf("got %v", err)
	}
	info, err := client.ServerInfo(t.Context())
	if err != nil || info.Name != "fake" || info.Can("sessions") {
		t.Errorf("got %v, %v", info, err)
	}
}

func started(index uint64) *legatov1.GenerateResponse {
	event := &legatov1.GenerateResponse_Started{Started: &legatov1.Started{Model: "m"}}
	return &legatov1.GenerateResponse{Index: index, Event: event}
}

func finished(index uint64) *legatov1.GenerateResponse {
	result := &legatov1.TaskResult{Result: &legatov1.TaskResult_Detect{Detect: &legatov1.DetectResult{}}}
	event := &legatov1.GenerateResponse_Finished{Finished: &legatov1.Finished{Result: result}}
	return &legatov1.GenerateResponse{Index: index, Event: event}
}

// A stream is whole or an error: nothing missing, Finished last, unknown events skipped.
func TestGenerateSeesWhatIsMissing(t *testing.T) {
	unknown := &legatov1.GenerateResponse{Index: 1}
	cases := []struct {
		messages []*legatov1.GenerateResponse
		end      error
		events   int
		want     error
	}{
		{[]*legatov1.GenerateResponse{started(0), unknown, finished(2)}, nil, 2, nil},
		{[]*legatov1.GenerateResponse{started(0), finished(2)}, nil, 1, ErrIncompleteStream},
		{[]*legatov1.GenerateResponse{started(0)}, nil, 1, ErrIncompleteStream},
		{[]*legatov1.GenerateResponse{started(0), finished(1)}, status.Error(codes.Internal, "no"), 1, ErrInternal},
		{nil, status.Error(codes.Aborted, "slow"), 0, ErrAborted},
	}
	for i, c := range cases {
		server := &fake{generate: func(stream grpc.ServerStreamingServer[legatov1.GenerateResponse]) error {
			for _, message := range c.messages {
				stream.Send(message)
			}
			return c.end
		}}
		events, last := 0, error(nil)
		for event, err := range server.dial(t).Generate(t.Context(), picture, DetectTask("bus")) {
			if last = err; event != nil {
				events++
			}
		}
		if events != c.events || !errors.Is(last, c.want) {
			t.Errorf("case %d: %d events, %v", i, events, last)
		}
	}
}

// Who leaves the loop cancels the request.
func TestLeavingTheLoopCancels(t *testing.T) {
	gone := make(chan struct{})
	server := &fake{generate: func(stream grpc.ServerStreamingServer[legatov1.GenerateResponse]) error {
		stream.Send(started(0))
		<-stream.Context().Done()
		close(gone)
		return nil
	}}
	for _, err := range server.dial(t).Generate(t.Context(), picture, DetectTask("bus")) {
		if err != nil {
			t.Fatal(err)
		}
		break
	}
	<-gone
}

// A session tells its terms, numbers frames, keeps the credits, and ends with io.EOF or the server's error.
func TestSession(t *testing.T) {
	frames := make(chan *legatov1.Frame, 2)
	server := &fake{session: func(
		stream grpc.BidiStreamingServer[legatov1.SessionRequest, legatov1.SessionResponse],
	) error {
		stream.Recv()
		opened := &legatov1.SessionOpened{SessionId: "s", FrameCredits: 4}
		stream.Send(&legatov1.SessionResponse{Message: &legatov1.SessionResponse_Opened{Opened: opened}})
		for index := uint64(1); ; index++ {
			request, err := stream.Recv()
			if err != nil {
				return status.Error(codes.Aborted, "no more")
			}
			frames <- request.GetFrame()
			accepted := &legatov1.FrameAccepted{Sequence: request.GetFrame().Stamp.Sequence, FrameCredits: 3}
			message := &legatov1.SessionResponse_Accepted{Accepted: accepted}
			stream.Send(&legatov1.SessionResponse{Index: index, Message: message})
		}
	}}
	session, err := server.dial(t).OpenSession(t.Context(), SessionConfig{Tasks: []Task{DetectTask("bus")}})
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	if session.Terms().SessionID != "s" || session.FrameCredits() != 4 {
		t.Errorf("got %v", session.Terms())
	}
	for _, want := range []uint64{7, 8} {
		frame := Frame{Image: picture}
		if want == 7 {
			frame.Stamp.Sequence = want
		}
		if sequence, err := session.Send(frame); err != nil || sequence != want {
			t.Errorf("got %d, %v", sequence, err)
		}
		if got := (<-frames).Stamp.Sequence; got != want {
			t.Errorf("sent %d", got)
		}
	}
	if session.FrameCredits() != 2 {
		t.Errorf("%d credits with two frames unresolved", session.FrameCredits())
	}
	session.CloseSend()
	var end error
	accepted := 0
	for event, err := range session.Events() {
		if _, ok := event.(*FrameAccepted); ok {
			accepted++
		}
		end = err
	}
	if accepted != 2 || session.FrameCredits() != 3 || !errors.Is(end, ErrAborted) {
		t.Errorf("%d accepted, %d credits, %v", accepted, session.FrameCredits(), end)
	}
	if _, err := session.Send(Frame{Image: picture}); err == nil {
		t.Error("sent after the end")
	}
}

// Now extrapolates the newest motion of each track, whatever the order of the results, and forgets what was not found for
// too long, or is no longer asked for.
func TestTracks(t *testing.T) {
	began := time.Date(2026, 11, 25, 0, 0, 0, 0, time.UTC)
	server := &fake{session: func(
		stream grpc.BidiStreamingServer[legatov1.SessionRequest, legatov1.SessionResponse],
	) error {
		open, err := stream.Recv()
		if unseen := open.GetOpen().StandingTasks[0].GetDetect().Tracking.MaxUnseen; err != nil || unseen.Seconds != 3 {
			t.Errorf("asked for %v, %v", unseen, err)
		}
		opened := &legatov1.SessionOpened{SessionId: "s", FrameCredits: 4}
		stream.Send(&legatov1.SessionResponse{Message: &legatov1.SessionResponse_Opened{Opened: opened}})
		for index, second := range []int64{1, 0} {
			motion := &legatov1.Motion{
				Position:          &legatov1.BoxAxes{CenterX: 0.25 * float32(second), Width: 0.5},
				Velocity:          &legatov1.BoxAxes{CenterX: 0.25},
				Acceleration:      &legatov1.BoxAxes{CenterX: 0.5},
				PositionDeviation: &legatov1.BoxAxes{CenterX: 3},
				VelocityDeviation: &legatov1.BoxAxes{CenterX: 2},
			}
			found := &legatov1.DetectedObject{Label: "bus", TrackId: "1", Motion: motion}
			detect := &legatov1.DetectResult{Objects: []*legatov1.DetectedObject{found}}
			result := &legatov1.FrameResult{
				Stamp:        FrameStamp{CaptureTime: began.Add(time.Duration(second) * time.Second), Sequence: uint64(second)}.message(),
				Result:       &legatov1.TaskResult{Result: &legatov1.TaskResult_Detect{Detect: detect}},
				LastForFrame: true,
				Age:          durationpb.New(time.Second),
			}
			message := &legatov1.SessionResponse_Result{Result: result}
			stream.Send(&legatov1.SessionResponse{Index: uint64(index) + 1, Message: message})
		}
		stream.Recv()
		return nil
	}}
	task := DetectTask("bus", WithTracking(3*time.Second))
	session, err := server.dial(t).OpenSession(t.Context(), SessionConfig{Tasks: []Task{task}})
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	for range 2 {
		if event, err := session.Recv(); err != nil || event.(*FrameResult).Age != time.Second {
			t.Fatal(event, err)
		}
	}
	tracks := session.NowAt(began.Add(3 * time.Second))
	if len(tracks) != 1 || tracks[0].Place.CenterX != 1.75 || tracks[0].Deviation.CenterX != 5 {
		t.Fatalf("got %+v", tracks)
	}
	if tracks[0].Age != 2*time.Second || tracks[0].Box() != (Box{XMin: 1.5, XMax: 2}) || tracks[0].Last.TrackID != "1" {
		t.Errorf("got %+v", tracks[0])
	}
	if gone := session.NowAt(began.Add(4*time.Second + 1)); len(gone) != 0 {
		t.Errorf("still %v", gone)
	}
	if err := session.Update(DetectTask("bus")); err != nil || len(session.NowAt(began)) != 0 {
		t.Errorf("untracked, but %v, %v", session.NowAt(began), err)
	}
}

// A session that is refused, never opened, or loses a message is an error.
func TestSessionsThatFail(t *testing.T) {
	type stream = grpc.BidiStreamingServer[legatov1.SessionRequest, legatov1.SessionResponse]
	cases := map[string]struct {
		serve func(stream) error
		want  error
	}{
		"refused": {func(stream) error { return status.Error(codes.NotFound, "no") }, ErrNotFound},
		"silent":  {func(s stream) error { <-s.Context().Done(); return nil }, context.DeadlineExceeded},
		"ended":   {func(stream) error { return nil }, ErrIncompleteStream},
		"gap": {func(s stream) error {
			return s.Send(&legatov1.SessionResponse{Index: 1})
		}, ErrIncompleteStream},
		"no terms": {func(s stream) error { return s.Send(&legatov1.SessionResponse{}) }, ErrIncompleteStream},
	}
	for name, c := range cases {
		timeout := DefaultTimeout
		if name == "silent" {
			timeout = 100 * time.Millisecond
		}
		client := (&fake{session: c.serve}).dial(t, WithTimeout(timeout))
		if _, err := client.OpenSession(t.Context(), SessionConfig{}); !errors.Is(err, c.want) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}
