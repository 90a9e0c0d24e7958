package legato

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"time"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

const chunkBytes = 256 << 10

// pixelBytes are those of a pixel in a row; for NV12, of a row of either plane.
var pixelBytes = map[PixelFormat]uint32{RGB8: 3, BGR8: 3, RGBA8: 4, BGRA8: 4, Mono8: 1, NV12: 1, YUYV: 2}

// HeldImage is a picture that the server holds: [Held] of its ImageID asks about it.
type HeldImage struct {
	ImageInfo
	// ExpireTime is when the server forgets it; it may have to do so earlier.
	ExpireTime time.Time
}

// PutImage uploads a picture once, to be asked about many times. The same bytes sent twice are one picture. The server
// holds it for ttl, or as long as it likes if that is 0 or more than it allows.
func (c *Client) PutImage(ctx context.Context, image Image, ttl time.Duration) (*HeldImage, error) {
	picture, err := load(image)
	if err != nil {
		return nil, err
	}
	header, data, err := uploadOf(picture)
	if err != nil {
		return nil, err
	}
	header.Ttl = duration(ttl)
	ctx = withHeader(ctx, metadata.Pairs(affinityKey, idOf(header, data)))
	ctx, cancel := withDeadline(ctx, c.settings.timeout)
	defer cancel()
	stream, err := c.images.PutImage(ctx)
	if err != nil {
		return nil, errorOf(err, nil)
	}
	if err := sendImage(stream, header, data); err != nil && !errors.Is(err, io.EOF) {
		return nil, errorOf(err, nil)
	}
	answer, err := stream.CloseAndRecv() // also tells why the server would not read on
	if err != nil {
		return nil, errorOf(err, stream.Trailer())
	}
	return &HeldImage{imageInfoOf(answer.Image), timeOf(answer.ExpireTime)}, nil
}

// DeleteImage has the server forget a picture. Running requests keep it until they end.
func (c *Client) DeleteImage(ctx context.Context, imageID string) error {
	request := &legatov1.DeleteImageRequest{ImageId: imageID}
	ctx = withHeader(ctx, metadata.Pairs(affinityKey, url.QueryEscape(imageID)))
	_, err := invoke(ctx, c, c.images.DeleteImage, request, func(*legatov1.DeleteImageResponse) any { return nil })
	return err
}

// uploadOf says what will be sent of a picture: its shape and its bytes.
func uploadOf(picture *legatov1.Image) (*legatov1.PutImageHeader, []byte, error) {
	header := &legatov1.PutImageHeader{}
	var data []byte
	switch source := picture.GetSource().(type) {
	case *legatov1.Image_Encoded:
		header.MimeType, data = source.Encoded.MimeType, source.Encoded.Data
	case *legatov1.Image_Raw:
		header.Layout, data = source.Raw.Layout, source.Raw.Data
	default:
		return nil, nil, misuse("image", "only bytes can be uploaded")
	}
	hash := sha256.Sum256(data)
	header.SizeBytes, header.Sha256 = uint64(len(data)), hash[:]
	return header, data, nil
}

// idOf is the id that a server will give the picture.
func idOf(header *legatov1.PutImageHeader, data []byte) string {
	hash := header.Sha256
	if layout := header.Layout; layout != nil {
		name := strings.ToLower(strings.TrimPrefix(layout.Format.String(), "PIXEL_FORMAT_"))
		stride := layout.RowStrideBytes
		if stride == 0 {
			stride = layout.Width * pixelBytes[PixelFormat(layout.Format)]
		}
		digest := sha256.New()
		fmt.Fprintf(digest, "%s:%dx%d:%d\n", name, layout.Width, layout.Height, stride)
		digest.Write(data)
		hash = digest.Sum(nil)
	}
	return "img_" + hex.EncodeToString(hash[:16])
}

func sendImage(
	stream grpc.ClientStreamingClient[legatov1.PutImageRequest, legatov1.PutImageResponse],
	header *legatov1.PutImageHeader, data []byte,
) error {
	part := &legatov1.PutImageRequest{Part: &legatov1.PutImageRequest_Header{Header: header}}
	if err := stream.Send(part); err != nil {
		return err
	}
	for chunk := range slices.Chunk(data, chunkBytes) {
		part := &legatov1.PutImageRequest{Part: &legatov1.PutImageRequest_Chunk{Chunk: chunk}}
		if err := stream.Send(part); err != nil {
			return err
		}
	}
	return nil
}
