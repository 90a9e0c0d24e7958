package legato

import (
	"fmt"
	"image"
	"image/draw"
	"io"
	"os"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
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
