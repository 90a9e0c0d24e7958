package legato

import (
	"context"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
)

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
