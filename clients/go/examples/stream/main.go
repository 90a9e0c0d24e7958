// Stream describes a picture and writes each word as it is made: stream street.jpg
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"

	"github.com/legato-vlm/legato/clients/go/legato"
)

func main() {
	log.SetFlags(0)
	server := flag.String("server", "127.0.0.1:50051", "address of the server")
	flag.Parse()
	if flag.NArg() != 1 {
		log.Fatal("usage: stream [-server ADDRESS] PICTURE")
	}
	err := stream(context.Background(), *server, flag.Arg(0))
	if errors.Is(err, legato.ErrBusy) {
		log.Fatal("the server is full; try again later")
	}
	if err != nil {
		log.Fatal(err)
	}
}

func stream(ctx context.Context, server, path string) error {
	client, err := legato.Dial(server)
	if err != nil {
		return err
	}
	defer client.Close()
	for event, err := range client.Generate(ctx, legato.File(path), legato.CaptionTask(legato.LongCaption)) {
		if err != nil {
			return err
		}
		switch event := event.(type) {
		case *legato.TextDelta:
			fmt.Print(event.Text)
		case *legato.Finished:
			fmt.Printf("\n%d tokens in %v\n", event.Info.Usage.Output, event.Info.Timings.Total)
		}
	}
	return nil
}
