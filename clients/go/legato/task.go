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
