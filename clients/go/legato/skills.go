package legato

import (
	"context"
	"iter"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
)

// All that differs between skills: tasks, results, the ways from and to the contract, calls.

// QueryTask answers a question.
func QueryTask(question string, options ...TaskOption) Task {
	query := &legatov1.QueryTask{Question: question}
	return taskOf(&legatov1.Task{Kind: &legatov1.Task_Query{Query: query}}, options)
}

// ChatTask answers the last question of a conversation: a [SystemMessage] first or not at all, then [UserMessage] and
// [AssistantMessage] by turns, the user last. The picture stands in front of the user's first words.
func ChatTask(messages []Message, options ...TaskOption) Task {
	query := &legatov1.QueryTask{Messages: all(messages, Message.message)}
	return taskOf(&legatov1.Task{Kind: &legatov1.Task_Query{Query: query}}, options)
}

// CaptionTask describes the picture.
func CaptionTask(length CaptionLength, options ...TaskOption) Task {
	caption := &legatov1.CaptionTask{Length: legatov1.CaptionLength(length)}
	return taskOf(&legatov1.Task{Kind: &legatov1.Task_Caption{Caption: caption}}, options)
}

// DetectTask boxes every instance of an object.
func DetectTask(object string, options ...TaskOption) Task {
	detect := &legatov1.DetectTask{Object: object}
	return taskOf(&legatov1.Task{Kind: &legatov1.Task_Detect{Detect: detect}}, options)
}

// PointTask points at every instance of an object.
func PointTask(object string, options ...TaskOption) Task {
	point := &legatov1.PointTask{Object: object}
	return taskOf(&legatov1.Task{Kind: &legatov1.Task_Point{Point: point}}, options)
}

// SegmentTask outlines an instance of an object.
func SegmentTask(object string, options ...TaskOption) Task {
	segment := &legatov1.SegmentTask{Object: object}
	return taskOf(&legatov1.Task{Kind: &legatov1.Task_Segment{Segment: segment}}, options)
}

// refsOf is where a task has its places; nil for one of a skill that takes none.
func refsOf(task *legatov1.Task) *[]*legatov1.SpatialRef {
	switch kind := task.Kind.(type) {
	case *legatov1.Task_Query:
		return &kind.Query.SpatialRefs
	case *legatov1.Task_Point:
		return &kind.Point.SpatialRefs
	case *legatov1.Task_Segment:
		return &kind.Segment.SpatialRefs
	}
	return nil
}

// QueryResult is the answer to a question.
type QueryResult struct {
	Answer string
	// Reasoning is nil unless it was asked for.
	Reasoning *Reasoning
	Info      Info
}

// CaptionResult describes a picture.
type CaptionResult struct {
	Caption string
	Info    Info
}

// DetectResult holds every instance found.
type DetectResult struct {
	Objects []*Detection
	Info    Info
}

// PointResult holds every instance found.
type PointResult struct {
	Points []*PointedObject
	Info   Info
}

// SegmentResult holds every outline found.
type SegmentResult struct {
	Segments []*Outline
	Info     Info
}

func (*QueryResult) result()   {}
func (*CaptionResult) result() {}
func (*DetectResult) result()  {}
func (*PointResult) result()   {}
func (*SegmentResult) result() {}

func queryOf(from *legatov1.QueryResponse) *QueryResult {
	return &QueryResult{from.Answer, reasoningOf(from.Reasoning), infoOf(from.Info)}
}

func captionOf(from *legatov1.CaptionResponse) *CaptionResult {
	return &CaptionResult{from.Caption, infoOf(from.Info)}
}

func detectOf(from *legatov1.DetectResponse) *DetectResult {
	return &DetectResult{all(from.Objects, detectionOf), infoOf(from.Info)}
}

func pointsOf(from *legatov1.PointResponse) *PointResult {
	return &PointResult{all(from.Points, pointedOf), infoOf(from.Info)}
}

func segmentOf(from *legatov1.SegmentResponse) *SegmentResult {
	return &SegmentResult{all(from.Segments, outlineOf), infoOf(from.Info)}
}

// taskResultOf gives a task's result the information that it shares with its siblings.
func taskResultOf(from *legatov1.TaskResult, info Info) TaskResult {
	result := TaskResult{TaskID: from.GetTaskId(), Err: errorOfTask(from.GetError())}
	info.Finish = finishOf(from.GetFinishReason())
	info.Usage, info.Timings = usageOf(from.GetUsage()), timingsOf(from.GetTimings())
	switch one := from.GetResult().(type) {
	case *legatov1.TaskResult_Query:
		result.Result = &QueryResult{one.Query.Answer, reasoningOf(one.Query.Reasoning), info}
	case *legatov1.TaskResult_Caption:
		result.Result = &CaptionResult{one.Caption.Caption, info}
	case *legatov1.TaskResult_Detect:
		result.Result = &DetectResult{all(one.Detect.Objects, detectionOf), info}
	case *legatov1.TaskResult_Point:
		result.Result = &PointResult{all(one.Point.Points, pointedOf), info}
	case *legatov1.TaskResult_Segment:
		result.Result = &SegmentResult{all(one.Segment.Segments, outlineOf), info}
	}
	return result
}

// Query answers a question about the picture, or without one if it is nil.
func (c *Client) Query(ctx context.Context, image Image, question string, options ...Option) (*QueryResult, error) {
	return c.query(ctx, image, QueryTask(question), options)
}

func (c *Client) query(ctx context.Context, image Image, task Task, options []Option) (*QueryResult, error) {
	ask, err := askOf(image, task, options)
	if err != nil {
		return nil, err
	}
	query := ask.task.GetQuery()
	request := &legatov1.QueryRequest{
		Image: ask.image, Question: query.Question, Messages: query.Messages, Reasoning: query.Reasoning,
		SpatialRefs: query.SpatialRefs, ResponseFormat: query.ResponseFormat, Images: query.Images,
		Sampling: ask.task.Sampling, Options: ask.options, Stamp: ask.stamp,
	}
	return invoke(outgoing(ctx, ask.callSettings), c, c.inference.Query, request, queryOf)
}

// Caption describes the picture.
func (c *Client) Caption(
	ctx context.Context, image Image, length CaptionLength, options ...Option,
) (*CaptionResult, error) {
	ask, err := askOf(image, CaptionTask(length), options)
	if err != nil {
		return nil, err
	}
	request := &legatov1.CaptionRequest{
		Image: ask.image, Length: ask.task.GetCaption().Length,
		Sampling: ask.task.Sampling, Options: ask.options, Stamp: ask.stamp,
	}
	return invoke(outgoing(ctx, ask.callSettings), c, c.inference.Caption, request, captionOf)
}

// Detect boxes every instance of an object, named by a noun phrase ("red cup").
func (c *Client) Detect(ctx context.Context, image Image, object string, options ...Option) (*DetectResult, error) {
	ask, err := askOf(image, DetectTask(object), options)
	if err != nil {
		return nil, err
	}
	detect := ask.task.GetDetect()
	request := &legatov1.DetectRequest{
		Image: ask.image, Object: detect.Object, MaxObjects: detect.MaxObjects,
		MinConfidence: detect.MinConfidence, Order: detect.Order,
		Sampling: ask.task.Sampling, Options: ask.options, Stamp: ask.stamp,
	}
	return invoke(outgoing(ctx, ask.callSettings), c, c.inference.Detect, request, detectOf)
}

// Point points at every instance of an object.
func (c *Client) Point(ctx context.Context, image Image, object string, options ...Option) (*PointResult, error) {
	ask, err := askOf(image, PointTask(object), options)
	if err != nil {
		return nil, err
	}
	point := ask.task.GetPoint()
	request := &legatov1.PointRequest{
		Image: ask.image, Object: point.Object, MaxObjects: point.MaxObjects, SpatialRefs: point.SpatialRefs,
		MinConfidence: point.MinConfidence, Order: point.Order,
		Sampling: ask.task.Sampling, Options: ask.options, Stamp: ask.stamp,
	}
	return invoke(outgoing(ctx, ask.callSettings), c, c.inference.Point, request, pointsOf)
}

// Segment outlines an instance of an object.
func (c *Client) Segment(ctx context.Context, image Image, object string, options ...Option) (*SegmentResult, error) {
	ask, err := askOf(image, SegmentTask(object), options)
	if err != nil {
		return nil, err
	}
	segment := ask.task.GetSegment()
	request := &legatov1.SegmentRequest{
		Image: ask.image, Object: segment.Object, SpatialRefs: segment.SpatialRefs,
		Sampling: ask.task.Sampling, Options: ask.options, Stamp: ask.stamp,
	}
	return invoke(outgoing(ctx, ask.callSettings), c, c.inference.Segment, request, segmentOf)
}

// Message is one message of a conversation.
type Message struct {
	role  legatov1.ChatRole
	parts []Part
}

// Part is a piece of a message: [Words] or [Shown].
type Part struct{ message *legatov1.ChatPart }

// Words are text of a message.
func Words(text string) Part {
	return Part{&legatov1.ChatPart{Part: &legatov1.ChatPart_Text{Text: text}}}
}

// Shown is the place of the next image of the call: of its picture, or of [WithImages].
func Shown() Part {
	return Part{&legatov1.ChatPart{Part: &legatov1.ChatPart_Image{Image: &legatov1.ImagePart{}}}}
}

// SystemMessage says what holds for the whole conversation.
func SystemMessage(text string) Message {
	return Message{legatov1.ChatRole_CHAT_ROLE_SYSTEM, []Part{Words(text)}}
}

// UserMessage is what the caller asks.
func UserMessage(text string) Message { return UserParts(Words(text)) }

// UserParts is what the caller asks, with images between the words: all images of the call are shown, or none.
func UserParts(parts ...Part) Message { return Message{legatov1.ChatRole_CHAT_ROLE_USER, parts} }

// AssistantMessage is an earlier answer of the model.
func AssistantMessage(text string) Message {
	return Message{legatov1.ChatRole_CHAT_ROLE_ASSISTANT, []Part{Words(text)}}
}

// Chat answers the last question of a conversation, see [ChatTask], about the picture, or without one if it is nil.
// The server keeps nothing of it: the next call brings this answer as an [AssistantMessage].
func (c *Client) Chat(
	ctx context.Context, image Image, messages []Message, options ...Option,
) (*QueryResult, error) {
	return c.query(ctx, image, ChatTask(messages), options)
}

func (m Message) message() *legatov1.ChatMessage {
	parts := all(m.parts, func(part Part) *legatov1.ChatPart { return part.message })
	return &legatov1.ChatMessage{Role: m.role, Parts: parts}
}

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

// Task is one thing to do with a picture, for [Client.Generate], [Client.RunTasks] and sessions.
type Task struct {
	message *legatov1.Task
	wrong   error
}

// CaptionLength is how much a caption says.
type CaptionLength int32

// The lengths of a caption; 0 is NormalCaption.
const (
	ShortCaption  = CaptionLength(legatov1.CaptionLength_CAPTION_LENGTH_SHORT)
	NormalCaption = CaptionLength(legatov1.CaptionLength_CAPTION_LENGTH_NORMAL)
	LongCaption   = CaptionLength(legatov1.CaptionLength_CAPTION_LENGTH_LONG)
)

// ObjectOrder is the order of objects in a result.
type ObjectOrder int32

// The orders of objects; 0 is OrderModel.
const (
	OrderModel      = ObjectOrder(legatov1.ObjectOrder_OBJECT_ORDER_MODEL)
	OrderConfidence = ObjectOrder(legatov1.ObjectOrder_OBJECT_ORDER_CONFIDENCE) // the greatest first
)

func taskOf(message *legatov1.Task, options []TaskOption) Task {
	wanted := settings{task: Task{message: message}}
	for _, option := range options {
		option.apply(&wanted)
	}
	return wanted.task
}

// messagesOf is the contract's form of tasks, or what is wrong with the first bad one.
func messagesOf(tasks []Task) ([]*legatov1.Task, error) {
	messages := make([]*legatov1.Task, len(tasks))
	for i, task := range tasks {
		if task.message == nil {
			return nil, misuse("tasks", "task %d is empty; make it with DetectTask and its like", i)
		}
		if task.wrong != nil {
			return nil, task.wrong
		}
		messages[i] = task.message
	}
	return messages, nil
}
