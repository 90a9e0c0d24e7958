package legato_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/legato-vlm/legato/clients/go/legato"
)

func ExampleClient_Detect() {
	client, err := legato.Dial("127.0.0.1:50051")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	found, err := client.Detect(context.Background(), legato.File("street.jpg"), "bicycle", legato.WithMaxObjects(5))
	if errors.Is(err, legato.ErrBusy) {
		log.Fatal("the server is full")
	}
	if err != nil {
		log.Fatal(err)
	}
	for _, object := range found.Objects {
		fmt.Println(object.Label, object.Box.Pixels(found.Info.Image.Size()))
	}
}

func ExampleClient_RunTasks() {
	client, err := legato.Dial("127.0.0.1:50051")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	answer, err := client.RunTasks(context.Background(), legato.File("street.jpg"), []legato.Task{
		legato.DetectTask("bicycle", legato.WithTaskID("bicycles")),
		legato.CaptionTask(legato.ShortCaption),
	})
	if err != nil {
		log.Fatal(err)
	}
	for _, one := range answer.Results {
		switch result := one.Result.(type) {
		case *legato.DetectResult:
			fmt.Println(one.TaskID, len(result.Objects))
		case *legato.CaptionResult:
			fmt.Println(result.Caption)
		case nil:
			fmt.Println(one.TaskID, one.Err)
		}
	}
}

func ExampleClient_OpenSession() {
	client, err := legato.Dial("127.0.0.1:50051")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	session, err := client.OpenSession(context.Background(), legato.SessionConfig{
		Tasks:       []legato.Task{legato.DetectTask("bicycle")},
		MaxFrameAge: 200 * time.Millisecond,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer session.Close()
	go func() {
		defer session.CloseSend()
		for _, path := range []string{"1.jpg", "2.jpg"} {
			stamp := legato.FrameStamp{FrameID: "front", CaptureTime: time.Now()}
			if _, err := session.Send(legato.Frame{Stamp: stamp, Image: legato.File(path)}); err != nil {
				return // Events says why
			}
		}
	}()
	for event, err := range session.Events() {
		if err != nil {
			log.Fatal(err)
		}
		switch event := event.(type) {
		case *legato.FrameResult:
			fmt.Println(event.Stamp.Sequence, event.Result, event.Err)
		case *legato.FrameDropped:
			fmt.Println(event.Sequence, event.Reason)
		}
	}
}
