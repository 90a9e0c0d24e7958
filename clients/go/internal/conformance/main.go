// Conformance runs the list of tests/conformance with grpc-go and the committed stubs; the README there says how it is
// called and what it prints.
package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	_ "github.com/legato-vlm/legato/clients/go/legato/v1" // the services of the list
	rpccode "google.golang.org/genproto/googleapis/rpc/code"
	_ "google.golang.org/genproto/googleapis/rpc/errdetails" // the details' types
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/health/grpc_health_v1" // a service of the list
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

type testCase struct {
	Name  string `json:"name"`
	Steps []step `json:"steps"`
}

type step struct {
	Call        string            `json:"call"`
	Metadata    map[string]string `json:"metadata"`
	Send        []any             `json:"send"`
	Timeout     float64           `json:"timeout"`
	CancelAfter int               `json:"cancelAfter"`
}

type seen struct {
	Code     string            `json:"code"`
	Messages []json.RawMessage `json:"messages"`
	Details  []json.RawMessage `json:"details"`
}

func main() {
	log.SetFlags(0)
	if len(os.Args) < 4 {
		log.Fatal("usage: conformance ADDRESS cases.json PICTURES NAME...")
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3], os.Args[4:]); err != nil {
		log.Fatal(err)
	}
}

func run(address, list, pictures string, names []string) error {
	text, err := os.ReadFile(list)
	if err != nil {
		return err
	}
	var cases []testCase
	if err := json.Unmarshal(text, &cases); err != nil {
		return err
	}
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	out := json.NewEncoder(os.Stdout)
	for _, one := range cases {
		if !slices.Contains(names, one.Name) {
			continue
		}
		steps, err := runCase(conn, one, pictures)
		if err != nil {
			return fmt.Errorf("%s: %w", one.Name, err)
		}
		if err := out.Encode(map[string]any{"case": one.Name, "steps": steps}); err != nil {
			return err
		}
	}
	return nil
}

func runCase(conn *grpc.ClientConn, one testCase, pictures string) ([]seen, error) {
	var done []seen
	for _, step := range one.Steps {
		messages, err := fill(step.Send, pictures, done)
		if err != nil {
			return nil, err
		}
		saw, err := call(conn, step, messages.([]any))
		if err != nil {
			return nil, err
		}
		done = append(done, saw)
	}
	return done, nil
}

// call makes one call. Every kind of call is bidirectional on the wire.
func call(conn *grpc.ClientConn, step step, messages []any) (seen, error) {
	saw := seen{Messages: []json.RawMessage{}, Details: []json.RawMessage{}}
	method, err := methodOf(step.Call)
	if err != nil {
		return saw, err
	}
	timeout := time.Minute
	if step.Timeout > 0 {
		timeout = time.Duration(step.Timeout * float64(time.Second))
	}
	ctx, cancel := context.WithTimeout(
		metadata.NewOutgoingContext(context.Background(), metadata.New(step.Metadata)), timeout)
	defer cancel()
	kind := &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}
	stream, err := conn.NewStream(ctx, kind, "/"+step.Call)
	if err != nil {
		return saw, saw.end(err)
	}
	if err := send(stream, method.Input(), messages); err != nil {
		return saw, err
	}
	for {
		message, err := newMessage(method.Output())
		if err != nil {
			return saw, err
		}
		if err := stream.RecvMsg(message); err != nil {
			return saw, saw.end(err)
		}
		if step.CancelAfter > 0 && len(saw.Messages) == step.CancelAfter {
			continue // it was on its way when the call was cancelled
		}
		text, err := protojson.Marshal(message)
		if err != nil {
			return saw, err
		}
		if saw.Messages = append(saw.Messages, text); len(saw.Messages) == step.CancelAfter {
			cancel()
		}
	}
}

func send(stream grpc.ClientStream, kind protoreflect.MessageDescriptor, messages []any) error {
	for _, message := range messages {
		text, err := json.Marshal(message)
		if err != nil {
			return err
		}
		request, err := newMessage(kind)
		if err != nil {
			return err
		}
		if err := protojson.Unmarshal(text, request); err != nil {
			return err
		}
		if err := stream.SendMsg(request); errors.Is(err, io.EOF) {
			return nil // the server has ended the call; what it said is still to be received
		} else if err != nil {
			return err
		}
	}
	return stream.CloseSend()
}

// end notes how a call ended.
func (s *seen) end(err error) error {
	if errors.Is(err, io.EOF) {
		err = nil
	}
	ended := status.Convert(err)
	s.Code = rpccode.Code(ended.Code()).String()
	for _, detail := range ended.Proto().GetDetails() {
		text, err := protojson.Marshal(detail)
		if err != nil {
			return err
		}
		s.Details = append(s.Details, text)
	}
	return nil
}

func methodOf(call string) (protoreflect.MethodDescriptor, error) {
	name := protoreflect.FullName(strings.Replace(call, "/", ".", 1))
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
	if err != nil {
		return nil, err
	}
	return found.(protoreflect.MethodDescriptor), nil
}

func newMessage(kind protoreflect.MessageDescriptor) (proto.Message, error) {
	found, err := protoregistry.GlobalTypes.FindMessageByName(kind.FullName())
	if err != nil {
		return nil, err
	}
	return found.New().Interface(), nil
}

// fill puts pictures and earlier answers into a template.
func fill(template any, pictures string, done []seen) (any, error) {
	switch template := template.(type) {
	case []any:
		filled := make([]any, len(template))
		for i, each := range template {
			var err error
			if filled[i], err = fill(each, pictures, done); err != nil {
				return nil, err
			}
		}
		return filled, nil
	case map[string]any:
		if file, ok := template["$file"].(string); ok {
			data, err := os.ReadFile(filepath.Join(pictures, file))
			return base64.StdEncoding.EncodeToString(data), err
		}
		if number, ok := template["$step"].(float64); ok {
			return answer(done[int(number)], template["at"].(string))
		}
		if number, ok := template["$checkpoint"].(float64); ok {
			return checkpointOf(done[int(number)])
		}
		filled := map[string]any{}
		for name, value := range template {
			var err error
			if filled[name], err = fill(value, pictures, done); err != nil {
				return nil, err
			}
		}
		return filled, nil
	}
	return template, nil
}

// answer is what the last message of a step has at a path.
func answer(step seen, path string) (any, error) {
	if len(step.Messages) == 0 {
		return nil, fmt.Errorf("no message has %s: %s", path, step.Code)
	}
	var found any
	if err := json.Unmarshal(step.Messages[len(step.Messages)-1], &found); err != nil {
		return nil, err
	}
	for name := range strings.SplitSeq(path, ".") {
		members, _ := found.(map[string]any)
		found = members[name]
	}
	return found, nil
}

// checkpointOf is the sum of a stream's checkpoints, as protobuf merges them.
func checkpointOf(step seen) (any, error) {
	whole := map[string]any{}
	for _, text := range step.Messages {
		var message struct {
			Checkpoint map[string]any `json:"checkpoint"`
		}
		if err := json.Unmarshal(text, &message); err != nil {
			return nil, err
		}
		for name, value := range message.Checkpoint {
			before, _ := whole[name].([]any)
			if more, ok := value.([]any); ok {
				value = append(before, more...)
			}
			whole[name] = value
		}
	}
	return whole, nil
}
