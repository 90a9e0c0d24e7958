package legato

import (
	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
)

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
