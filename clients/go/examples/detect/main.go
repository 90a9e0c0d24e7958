// Detect boxes what you name in a picture: detect street.jpg bicycle
package main

import (
	"context"
	"flag"
	"fmt"
	"log"

	"github.com/legato-vlm/legato/clients/go/legato"
)

func main() {
	log.SetFlags(0)
	server := flag.String("server", "127.0.0.1:50051", "address of the server")
	flag.Parse()
	if flag.NArg() != 2 {
		log.Fatal("usage: detect [-server ADDRESS] PICTURE OBJECT")
	}
	if err := detect(context.Background(), *server, flag.Arg(0), flag.Arg(1)); err != nil {
		log.Fatal(err)
	}
}

func detect(ctx context.Context, server, path, object string) error {
	client, err := legato.Dial(server)
	if err != nil {
		return err
	}
	defer client.Close()
	found, err := client.Detect(ctx, legato.File(path), object)
	if err != nil {
		return err
	}
	for _, one := range found.Objects {
		fmt.Println(one.Label, one.Box.Pixels(found.Info.Image.Size()))
	}
	return nil
}
