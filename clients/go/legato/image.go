package legato

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"image"
	"image/draw"
	"io"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/durationpb"
)

// Image is a picture to ask about. nil is no picture, which only a query accepts.
type Image interface {
	// message reads the picture. Its bytes may be the caller's own.
	message() (*legatov1.Image, error)
}

type imageFunc func() (*legatov1.Image, error)

func (read imageFunc) message() (*legatov1.Image, error) { return read() }

// File is a JPEG, PNG or WebP file on this machine, read when a call is made. The server turns files upright by their
// EXIF orientation and composites alpha on white.
func File(path string) Image {
	return imageFunc(func() (*legatov1.Image, error) {
		data, err := os.ReadFile(path)
		return encoded(data), err
	})
}

// Bytes is the content of a JPEG, PNG or WebP file. It may not change while a call uses it.
func Bytes(data []byte) Image {
	return imageFunc(func() (*legatov1.Image, error) { return encoded(data), nil })
}

// Reader gives the content of a JPEG, PNG or WebP file. It is read to its end, once: the picture is for one call.
func Reader(from io.Reader) Image {
	return imageFunc(func() (*legatov1.Image, error) {
		data, err := io.ReadAll(from)
		return encoded(data), err
	})
}

// Held is a picture that the server has, by the id of [Client.PutImage] or of an earlier answer's [ImageInfo].
func Held(imageID string) Image {
	return imageFunc(func() (*legatov1.Image, error) {
		return &legatov1.Image{Source: &legatov1.Image_ImageId{ImageId: imageID}}, nil
	})
}

// Picture is a decoded image, sent as pixels: quick on one machine, large on a network, where [Bytes] of a JPEG file
// is better. *image.Gray and opaque *image.RGBA and *image.NRGBA are sent as they are. Others are converted: alpha is
// composited on white, as the server does to files, and samples of 16 bits keep their high byte.
func Picture(from image.Image) Image {
	return imageFunc(func() (*legatov1.Image, error) {
		size := from.Bounds().Size()
		switch from := from.(type) {
		case *image.RGBA:
			if from.Opaque() {
				return Pixels{size.X, size.Y, from.Stride, RGBA8, from.Pix}.message()
			}
		case *image.NRGBA:
			if from.Opaque() {
				return Pixels{size.X, size.Y, from.Stride, RGBA8, from.Pix}.message()
			}
		case *image.Gray:
			return Pixels{size.X, size.Y, from.Stride, Mono8, from.Pix}.message()
		}
		drawn := image.NewRGBA(image.Rectangle{Max: size})
		draw.Draw(drawn, drawn.Rect, image.White, image.Point{}, draw.Src)
		draw.Draw(drawn, drawn.Rect, from, from.Bounds().Min, draw.Over)
		return Pixels{size.X, size.Y, drawn.Stride, RGBA8, drawn.Pix}.message()
	})
}

// PixelFormat is how a pixel is stored.
type PixelFormat int32

// Every server reads the formats of 8-bit RGB and Mono8; the others are words of [ServerInfo.Capabilities].
const (
	RGB8  = PixelFormat(legatov1.PixelFormat_PIXEL_FORMAT_RGB8)
	BGR8  = PixelFormat(legatov1.PixelFormat_PIXEL_FORMAT_BGR8)
	RGBA8 = PixelFormat(legatov1.PixelFormat_PIXEL_FORMAT_RGBA8)
	BGRA8 = PixelFormat(legatov1.PixelFormat_PIXEL_FORMAT_BGRA8)
	Mono8 = PixelFormat(legatov1.PixelFormat_PIXEL_FORMAT_MONO8)
	NV12  = PixelFormat(legatov1.PixelFormat_PIXEL_FORMAT_NV12)
	YUYV  = PixelFormat(legatov1.PixelFormat_PIXEL_FORMAT_YUYV)
)

// Pixels is an [Image] without a file format. The server ignores alpha of pixels.
type Pixels struct {
	Width, Height int
	// Stride is the number of bytes from one row to the next; 0: rows follow each other without padding.
	Stride int
	Format PixelFormat
	// Data may not change while a call uses it.
	Data []byte
}

// ClipFrame is an image of [WithImages] that was taken at a time after its clip began. The frames of a clip follow each
// other, each later than the one before.
func ClipFrame(image Image, time time.Duration) Image { return clipFrame{image, durationpb.New(time)} }

type clipFrame struct {
	Image
	time *durationpb.Duration
}

func (p Pixels) message() (*legatov1.Image, error) {
	if p.Width < 0 || p.Height < 0 || p.Stride < 0 {
		return nil, misuse("image.raw.layout", "%d x %d pixels, stride %d", p.Width, p.Height, p.Stride)
	}
	layout := &legatov1.PixelLayout{
		Width:          uint32(p.Width),
		Height:         uint32(p.Height),
		RowStrideBytes: uint32(p.Stride),
		Format:         legatov1.PixelFormat(p.Format),
	}
	raw := &legatov1.RawImage{Layout: layout, Data: p.Data}
	return &legatov1.Image{Source: &legatov1.Image_Raw{Raw: raw}}, nil
}

func encoded(data []byte) *legatov1.Image {
	file := &legatov1.EncodedImage{Data: data}
	return &legatov1.Image{Source: &legatov1.Image_Encoded{Encoded: file}}
}

// load reads a picture; nil stays nil.
func load(picture Image) (*legatov1.Image, error) {
	if picture == nil {
		return nil, nil
	}
	message, err := picture.message()
	if _, refused := err.(*Error); err != nil && !refused {
		err = fmt.Errorf("legato: cannot read the picture: %w", err)
	}
	return message, err
}

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
