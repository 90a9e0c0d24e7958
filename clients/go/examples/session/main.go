// Session looks for an object in pictures that come like a camera's frames: session bicycle frame1.jpg frame2.jpg ...
//
// Frames that come faster than answers give way to newer ones, which is what a robot wants.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"time"

	"github.com/legato-vlm/legato/clients/go/legato"
)

func main() {
	log.SetFlags(0)
	server := flag.String("server", "127.0.0.1:50051", "address of the server")
	rate := flag.Float64("fps", 10, "frames a second")
	flag.Parse()
	if flag.NArg() < 2 {
		log.Fatal("usage: session [-server ADDRESS] [-fps RATE] OBJECT PICTURE...")
	}
	interval := time.Duration(float64(time.Second) / *rate)
	if err := watch(context.Background(), *server, flag.Arg(0), flag.Args()[1:], interval); err != nil {
		log.Fatal(err)
	}
}

func watch(ctx context.Context, server, object string, paths []string, interval time.Duration) error {
	client, err := legato.Dial(server)
	if err != nil {
		return err
	}
	defer client.Close()
	session, err := client.OpenSession(ctx, legato.SessionConfig{Tasks: []legato.Task{legato.DetectTask(object)}})
	if err != nil {
		return err
	}
	defer session.Close()

	sent := make(chan error, 1)
	go func() { sent <- send(session, paths, interval) }()
	for event, err := range session.Events() {
		if err != nil {
			return err
		}
		show(event)
	}
	return <-sent
}

// send is the camera; it never waits for answers.
func send(session *legato.Session, paths []string, interval time.Duration) error {
	defer session.CloseSend()
	for tick := time.Tick(interval); len(paths) > 0; paths = paths[1:] {
		frame := legato.Frame{
			Stamp: legato.FrameStamp{FrameID: paths[0], CaptureTime: time.Now()},
			Image: legato.File(paths[0]),
		}
		if _, err := session.Send(frame); err != nil {
			return err
		}
		<-tick
	}
	return nil
}

func show(event legato.SessionEvent) {
	switch event := event.(type) {
	case *legato.FrameDropped:
		fmt.Printf("frame %d dropped: %s\n", event.Sequence, event.Reason)
	case *legato.FrameResult:
		age := time.Since(event.Stamp.CaptureTime).Round(time.Millisecond)
		if event.Err != nil {
			fmt.Printf("frame %d after %v: %v\n", event.Stamp.Sequence, age, event.Err)
			return
		}
		for _, one := range event.Result.(*legato.DetectResult).Objects {
			fmt.Printf("frame %d after %v: %s %v\n",
				event.Stamp.Sequence, age, one.Label, one.Box.Pixels(event.Image.Size()))
		}
	}
}
