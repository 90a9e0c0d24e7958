package legato

import (
	"image"
	"reflect"
	"testing"
)

// A place in pixels is the share of the size, rounded.
func TestPixels(t *testing.T) {
	if got := (Point{0.5, 1}).Pixels(641, 480); got != image.Pt(321, 480) {
		t.Errorf("got %v", got)
	}
	box := Box{0, 0.25, 0.333, 1}
	info := ImageInfo{Width: 300, Height: 200}
	if got := box.Pixels(info.Size()); got != image.Rect(0, 50, 100, 200) {
		t.Errorf("got %v", got)
	}
}

// The rings of a path are closed without a repeated point; curves are chords; small letters are relative.
func TestPolygons(t *testing.T) {
	square := [][]Point{{{0, 0}, {1, 0}, {1, 1}, {0, 1}}}
	cases := map[string][][]Point{
		"":                                    nil,
		"M0 0 L1 0":                           nil, // encloses nothing
		"M0,0 L1,0 L1,1 L0,1 Z":               square,
		"M0 0 1 0 1 1 0 1 0 0":                square, // further numbers are lines
		"m0 0 h1 v1 h-1 z":                    square,
		"M0 0H1V1H0Z":                         square,
		"M0 0 Q.5-1 1 0 C1 0 1 1 1 1 T0 1":    square,
		"M0 0 A1 1 0 0 1 1 0 S1 1 1 1 L0 1 Z": square,
		"M0 0 L1 0 L1 1 Z L0 1 L1 1":          {{{0, 0}, {1, 0}, {1, 1}}, {{0, 0}, {0, 1}, {1, 1}}},
	}
	for path, want := range cases {
		got, err := polygons(path)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: got %v, %v", path, got, err)
		}
	}
}

// What is no path is an error.
func TestPolygonsOfBadPaths(t *testing.T) {
	for _, path := range []string{"hello", "L0 0 1 1", "M0", "M0 0 L1", "M0 0 Z 1", "0 0", "M0 0 #", "M0 L1 1"} {
		if rings, err := polygons(path); err == nil {
			t.Errorf("%q: got %v", path, rings)
		}
	}
}

// An outline lies in its box.
func TestOutlineIsPlacedInItsBox(t *testing.T) {
	outline := Outline{Path: "M0 0 L1 0 L1 1 Z", Box: Box{0.25, 0.5, 0.75, 1}}
	got, err := outline.Polygons()
	want := [][]Point{{{0.25, 0.5}, {0.75, 0.5}, {0.75, 1}}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, %v", got, err)
	}
}
