package legato

import (
	"context"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
)

// Message is one message of a conversation.
type Message struct {
	role legatov1.ChatRole
	text string
}

// SystemMessage says what holds for the whole conversation.
func SystemMessage(text string) Message { return Message{legatov1.ChatRole_CHAT_ROLE_SYSTEM, text} }

// UserMessage is what the caller asks.
func UserMessage(text string) Message { return Message{legatov1.ChatRole_CHAT_ROLE_USER, text} }

// AssistantMessage is an earlier answer of the model.
func AssistantMessage(text string) Message {
	return Message{legatov1.ChatRole_CHAT_ROLE_ASSISTANT, text}
}

// Chat answers the last question of a conversation, see [ChatTask], about the picture, or without one if it is nil.
// The server keeps nothing of it: the next call brings this answer as an [AssistantMessage].
func (c *Client) Chat(
	ctx context.Context, image Image, messages []Message, options ...Option,
) (*QueryResult, error) {
	return c.query(ctx, image, ChatTask(messages), options)
}

func (m Message) message() *legatov1.ChatMessage {
	part := &legatov1.ChatPart{Part: &legatov1.ChatPart_Text{Text: m.text}}
	return &legatov1.ChatMessage{Role: m.role, Parts: []*legatov1.ChatPart{part}}
}
