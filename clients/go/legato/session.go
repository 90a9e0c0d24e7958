package legato

import (
	"context"
	"errors"
	"io"
	"iter"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
)

// ErrSessionEnded: a message could not be sent any more; [Session.Recv] says why.
var ErrSessionEnded = errors.New("legato: the session has ended")

// FramePolicy is what happens when frames come faster than answers.
type FramePolicy int32

// The policies; 0 is LatestWins.
const (
	// LatestWins: one frame waits, and a newer one takes its place.
	LatestWins = FramePolicy(legatov1.FramePolicy_FRAME_POLICY_LATEST_WINS)
	// EveryFrame: frames queue up to the credits.
	EveryFrame = FramePolicy(legatov1.FramePolicy_FRAME_POLICY_EVERY_FRAME)
	// Preempt: as LatestWins, and running work of the older frame is stopped too.
	Preempt = FramePolicy(legatov1.FramePolicy_FRAME_POLICY_PREEMPT)
)

// SessionConfig opens a session; what is 0 or empty is the server's choice.
type SessionConfig struct {
	// Name is for logs and metrics, at most 64 characters. A proxy sends sessions of one name to one server, as far as
	// that leaves the servers even.
	Name, Model, Adapter string
	// Tasks are done with every frame, at most 32.
	Tasks  []Task
	Policy FramePolicy
	// MaxInFlight is the number of frames worked on at a time; the grant may be lower.
	MaxInFlight uint32
	// MaxFrameAge drops older frames instead of answering late, counted from their CaptureTime or else their arrival.
	// 0: no bound.
	MaxFrameAge time.Duration
	// Heartbeat bounds the server's silence, at least 100 ms.
	Heartbeat time.Duration
	// StreamDeltas also streams events while tasks decode.
	StreamDeltas bool
	// ResponseCredits are the answers that the client is ready for, as by [Session.Grant]. 0: any number.
	ResponseCredits uint32
	// Priority and Tenant are as [WithPriority] and [WithTenant].
	Priority int
	Tenant   string
}

// SessionTerms are what the server granted.
type SessionTerms struct {
	SessionID, Model       string
	FrameCredits           uint32
	MaxInFlight            uint32
	Heartbeat              time.Duration
	ServerContractRevision uint32
}

// Frame is one picture to work on.
type Frame struct {
	// Stamp is echoed in the results. Its Sequence names the frame and grows from frame to frame; 0 has Send number
	// it.
	Stamp FrameStamp
	Image Image
	// Tasks are for this frame only, after those of the session.
	Tasks []Task
	// OnlyTasks leaves the session's own tasks out.
	OnlyTasks bool
	// MustRun: never drop this frame.
	MustRun bool
}

// Session is a long conversation about a stream of frames. Send and Recv belong in goroutines of their own,
// because a goroutine that waits for credit without reading waits for ever. Send may be called by any number of
// goroutines, Recv by one.
//
// Each frame sent gets exactly one of: a [FrameResult] for each of its tasks, the last with Last; or one
// [FrameDropped].
type Session struct {
	terms      SessionTerms
	stream     grpc.BidiStreamingClient[legatov1.SessionRequest, legatov1.SessionResponse]
	cancel     context.CancelFunc
	window     atomic.Uint32 // frames that may be unresolved, as the server said last
	unresolved sync.Map      // by sequence: frames sent, neither accepted nor dropped

	tracks trackMemory

	sending  sync.Mutex
	sequence uint64

	next uint64 // index of the next message; Recv's own
}

// OpenSession opens a session, which lives until its context ends, [Session.Close], or the server's end of it. The
// server has to open it within the client's timeout.
func (c *Client) OpenSession(ctx context.Context, config SessionConfig) (*Session, error) {
	open, err := config.message()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(outgoing(ctx, config.header()))
	patience := time.AfterFunc(c.settings.timeout, cancel)
	session, err := c.openSession(ctx, open)
	if !patience.Stop() {
		err = &Error{Code: codes.DeadlineExceeded, Message: "the server did not open the session in time"}
	}
	if err != nil {
		cancel()
		return nil, err
	}
	session.cancel = cancel
	return session, nil
}

func (c *Client) openSession(ctx context.Context, open *legatov1.SessionOpen) (*Session, error) {
	stream, err := c.sessions.Session(ctx)
	if err != nil {
		return nil, errorOf(err, nil)
	}
	session := &Session{stream: stream}
	session.tracks.use(open.StandingTasks)
	first := &legatov1.SessionRequest{Message: &legatov1.SessionRequest_Open{Open: open}}
	if err := session.send(first); err != nil && !errors.Is(err, ErrSessionEnded) {
		return nil, err
	}
	message, err := session.receive()
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if message.GetOpened() == nil {
		return nil, incomplete("the session did not begin with its terms")
	}
	session.terms = termsOf(message.GetOpened())
	session.window.Store(session.terms.FrameCredits)
	return session, nil
}

// Terms are what the server granted.
func (s *Session) Terms() SessionTerms { return s.terms }

// FrameCredits are the frames that may be sent now: the server's window, less those that it has neither accepted nor
// dropped yet, as far as Recv has read. What is sent beyond them is dropped, or takes a waiting frame's place.
func (s *Session) FrameCredits() uint32 {
	free := s.window.Load()
	s.unresolved.Range(func(any, any) bool {
		if free > 0 {
			free--
		}
		return free > 0
	})
	return free
}

// Send gives the server a frame and returns its sequence. It waits while the connection is full.
func (s *Session) Send(frame Frame) (sequence uint64, err error) {
	message, err := frame.message()
	if err != nil {
		return 0, err
	}
	s.sending.Lock()
	defer s.sending.Unlock()
	if message.Stamp.Sequence == 0 {
		message.Stamp.Sequence = s.sequence + 1
	}
	s.sequence = message.Stamp.Sequence
	s.unresolved.Store(s.sequence, nil)
	s.tracks.sent(message.Stamp)
	return s.sequence, s.send(&legatov1.SessionRequest{Message: &legatov1.SessionRequest_Frame{Frame: message}})
}

// CancelFrame stops a frame: it ends dropped, or with partial results if it runs.
func (s *Session) CancelFrame(sequence uint64) error {
	cancel := &legatov1.CancelFrame{Target: &legatov1.CancelFrame_Sequence{Sequence: sequence}}
	return s.sendAlone(&legatov1.SessionRequest{Message: &legatov1.SessionRequest_Cancel{Cancel: cancel}})
}

// CancelTask stops all running tasks of this id: their results come partial.
func (s *Session) CancelTask(taskID string) error {
	cancel := &legatov1.CancelFrame{Target: &legatov1.CancelFrame_TaskId{TaskId: taskID}}
	return s.sendAlone(&legatov1.SessionRequest{Message: &legatov1.SessionRequest_Cancel{Cancel: cancel}})
}

// Grant allows more answers, where [SessionConfig.ResponseCredits] bounds them.
func (s *Session) Grant(answers uint32) error {
	grant := &legatov1.GrantCredits{Responses: answers}
	return s.sendAlone(&legatov1.SessionRequest{Message: &legatov1.SessionRequest_Grant{Grant: grant}})
}

// Update replaces the session's tasks, from the next frame on.
func (s *Session) Update(tasks ...Task) error {
	messages, err := messagesOf(tasks)
	if err != nil {
		return err
	}
	s.tracks.use(messages)
	update := &legatov1.UpdateTasks{StandingTasks: messages}
	return s.sendAlone(&legatov1.SessionRequest{Message: &legatov1.SessionRequest_Update{Update: update}})
}

// CloseSend says that no more frames will come. What runs is finished; then Recv ends with [io.EOF].
func (s *Session) CloseSend() error {
	s.sending.Lock()
	defer s.sending.Unlock()
	return s.stream.CloseSend()
}

// Close gives the session up, with all that runs.
func (s *Session) Close() { s.cancel() }

// Recv waits for the server's next message. [io.EOF] is the session's good end, an *[Error] a bad one.
func (s *Session) Recv() (SessionEvent, error) {
	for {
		message, err := s.receive()
		if err != nil {
			return nil, err
		}
		event := sessionEventOf(message)
		switch event := event.(type) {
		case nil: // newer than this package
			continue
		case *FrameAccepted:
			s.unresolved.Delete(event.Sequence)
			s.window.Store(event.FrameCredits)
		case *FrameDropped:
			s.unresolved.Delete(event.Sequence)
			s.window.Store(event.FrameCredits)
			s.tracks.settled(event.Sequence)
		case *FrameResult: // says accepted too
			s.unresolved.Delete(event.Stamp.Sequence)
			s.tracks.received(event)
			if event.Last {
				s.tracks.settled(event.Stamp.Sequence)
			}
		}
		return event, nil
	}
}

// Now is where the tracked objects of all the session's tasks are expected, with how sure that is, from the results that
// Recv has read. An object that was not found for the time of its [WithTracking] is not among them.
func (s *Session) Now() []TrackNow { return s.NowAt(time.Now()) }

// NowAt is as [Session.Now], at a moment of the clock of the stamps' capture times.
func (s *Session) NowAt(at time.Time) []TrackNow { return s.tracks.now(at) }

// Events yields what Recv gives until the session ends; only a bad end is yielded.
func (s *Session) Events() iter.Seq2[SessionEvent, error] {
	return func(yield func(SessionEvent, error) bool) {
		for {
			event, err := s.Recv()
			if errors.Is(err, io.EOF) || !yield(event, err) || err != nil {
				return
			}
		}
	}
}

func (s *Session) sendAlone(message *legatov1.SessionRequest) error {
	s.sending.Lock()
	defer s.sending.Unlock()
	return s.send(message)
}

func (s *Session) send(message *legatov1.SessionRequest) error {
	err := s.stream.Send(message)
	if errors.Is(err, io.EOF) {
		return ErrSessionEnded
	}
	if err != nil {
		return errorOf(err, nil)
	}
	return nil
}

func (s *Session) receive() (*legatov1.SessionResponse, error) {
	message, err := s.stream.Recv()
	switch {
	case errors.Is(err, io.EOF):
		return nil, io.EOF
	case err != nil:
		return nil, errorOf(err, s.stream.Trailer())
	case message.Index != s.next:
		return nil, incomplete("message %d of the session is missing, got %d", s.next, message.Index)
	}
	s.next++
	return message, nil
}

func (config SessionConfig) header() callSettings {
	var options []CallOption
	if config.Priority != 0 {
		options = append(options, WithPriority(config.Priority))
	}
	if config.Tenant != "" {
		options = append(options, WithTenant(config.Tenant))
	}
	if config.Name != "" {
		options = append(options, header(affinityKey, url.QueryEscape(config.Name)))
	}
	return callOf(options)
}

func (config SessionConfig) message() (*legatov1.SessionOpen, error) {
	tasks, err := messagesOf(config.Tasks)
	if err != nil {
		return nil, err
	}
	return &legatov1.SessionOpen{
		SessionName:       config.Name,
		Model:             config.Model,
		Adapter:           config.Adapter,
		StandingTasks:     tasks,
		FramePolicy:       legatov1.FramePolicy(config.Policy),
		MaxInFlight:       config.MaxInFlight,
		MaxFrameAge:       duration(config.MaxFrameAge),
		HeartbeatInterval: duration(config.Heartbeat),
		StreamDeltas:      config.StreamDeltas,
		ResponseCredits:   config.ResponseCredits,
	}, nil
}

func (f Frame) message() (*legatov1.Frame, error) {
	tasks, err := messagesOf(f.Tasks)
	if err != nil {
		return nil, err
	}
	picture, err := load(f.Image)
	if err != nil {
		return nil, err
	}
	return &legatov1.Frame{
		Stamp:             f.Stamp.message(),
		Image:             picture,
		ExtraTasks:        tasks,
		SkipStandingTasks: f.OnlyTasks,
		MustRun:           f.MustRun,
	}, nil
}
