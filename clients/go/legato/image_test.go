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
