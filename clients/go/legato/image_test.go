package legato

import (
	"bytes"
	"errors"
	"image"
	"image/color"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
)

// A file is the same picture by its path, its bytes or a reader of it.
func TestFilesBytesAndReaders(t *testing.T) {
	data := []byte("not really a picture")
	path := filepath.Join(t.TempDir(), "a.jpg")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, picture := range []Image{File(path), Bytes(data), Reader(bytes.NewReader(data))} {
		message, err := load(picture)
		if err != nil || !bytes.Equal(message.GetEncoded().GetData(), data) {
			t.Errorf("got %v, %v", message, err)
		}
	}
}

// What cannot be read keeps its own error.
func TestUnreadablePictures(t *testing.T) {
	if _, err := load(File("/no/such/file")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	broken, writer := io.Pipe()
	writer.CloseWithError(io.ErrUnexpectedEOF)
	if _, err := load(Reader(broken)); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %v", err)
	}
	if _, err := load(Pixels{Width: -1, Height: 1, Format: RGB8}); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("got %v", err)
	}
}

// Any picture of Go's is sent with the colours that it shows, a part of one with its own rows.
func TestGoPictures(t *testing.T) {
	colour := color.RGBA{200, 100, 50, 255}
	whole := image.Rect(0, 0, 6, 4)
	part := image.Rect(2, 1, 4, 3)
	rgba, nrgba := image.NewRGBA(whole), image.NewNRGBA(whole)
	gray, paletted := image.NewGray(whole), image.NewPaletted(whole, color.Palette{color.Black, colour})
	for _, picture := range []interface {
		image.Image
		Set(x, y int, c color.Color)
		SubImage(r image.Rectangle) image.Image
	}{rgba, nrgba, gray, paletted} {
		picture.Set(2, 1, colour)
		message, err := load(Picture(picture.SubImage(part)))
		if err != nil {
			t.Fatal(err)
		}
		layout, pixels := message.GetRaw().Layout, message.GetRaw().Data
		if layout.Width != 2 || layout.Height != 2 {
			t.Errorf("%T: got %v", picture, layout)
		}
		want := []byte{200, 100, 50, 255}
		if layout.Format == legatov1.PixelFormat_PIXEL_FORMAT_MONO8 {
			want = []byte{color.GrayModel.Convert(colour).(color.Gray).Y}
		}
		if !bytes.HasPrefix(pixels, want) {
			t.Errorf("%T: got %v, want %v", picture, pixels[:4], want)
		}
		lastRow := int(layout.RowStrideBytes) * int(layout.Height-1)
		if len(pixels) < lastRow+int(layout.Width)*len(want) {
			t.Errorf("%T: %d bytes for %v", picture, len(pixels), layout)
		}
	}
}

// What is transparent is white, as of a file: neither hidden colours nor the black of premultiplied ones are sent.
// Samples of 16 bits keep their high byte.
func TestAlphaAndSixteenBits(t *testing.T) {
	one := image.Rect(0, 0, 1, 1)
	for _, each := range []struct {
		picture interface {
			image.Image
			Set(x, y int, c color.Color)
		}
		colour color.Color
		want   [3]byte
	}{
		{image.NewNRGBA(one), color.NRGBA{200, 0, 0, 0}, [3]byte{255, 255, 255}},
		{image.NewRGBA(one), color.RGBA{}, [3]byte{255, 255, 255}},
		{image.NewNRGBA(one), color.NRGBA{200, 100, 0, 51}, [3]byte{244, 224, 204}},
		{image.NewRGBA(one), color.NRGBA{200, 100, 0, 51}, [3]byte{244, 224, 204}},
		{image.NewNRGBA64(one), color.NRGBA64{0x1234, 0x5678, 0x9abc, 0xffff}, [3]byte{0x12, 0x56, 0x9a}},
		{image.NewRGBA64(one), color.NRGBA64{0x1234, 0x5678, 0x9abc, 0}, [3]byte{255, 255, 255}},
		{image.NewGray16(one), color.Gray16{0x7fff}, [3]byte{0x7f, 0x7f, 0x7f}},
		{image.NewPaletted(one, color.Palette{color.Transparent}), color.Transparent, [3]byte{255, 255, 255}},
	} {
		each.picture.Set(0, 0, each.colour)
		message, err := load(Picture(each.picture))
		if err != nil {
			t.Fatal(err)
		}
		for channel, want := range each.want {
			if got := message.GetRaw().Data[channel]; max(got, want)-min(got, want) > 1 {
				t.Errorf("%T of %v: got %v, want %v", each.picture, each.colour, message.GetRaw().Data, each.want)
				break
			}
		}
	}
}

// An upload's id is known before it is sent: the one that the server will give it.
func TestTheIDOfAnUpload(t *testing.T) {
	for want, image := range map[string]Image{
		"img_41e5787e9f28562d07b891b1816b4923": Bytes([]byte("jpeg")),
		"img_cc5bcb65628ea0d208d0e22d9966b6ab": Pixels{Width: 2, Height: 1, Format: RGB8, Data: []byte("abcdef")},
	} {
		message, err := load(image)
		if err != nil {
			t.Fatal(err)
		}
		header, data, err := uploadOf(message)
		if err != nil {
			t.Fatal(err)
		}
		if got := idOf(header, data); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}
