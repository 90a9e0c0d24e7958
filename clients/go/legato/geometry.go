package legato

import (
	"image"
	"math"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
)

// Point is a place in the picture as shown (after EXIF orientation): shares of its width and height in [0, 1], the
// origin top left, y down.
type Point struct {
	X, Y float32
}

// Pixels is the nearest pixel corner in a picture of this size.
func (p Point) Pixels(width, height int) image.Point {
	return image.Pt(scale(p.X, width), scale(p.Y, height))
}

// Box is an axis-aligned rectangle in the coordinates of [Point].
type Box struct {
	XMin, YMin, XMax, YMax float32
}

// Pixels is the box in a picture of this size, rounded.
func (b Box) Pixels(width, height int) image.Rectangle {
	return image.Rectangle{
		Min: Point{b.XMin, b.YMin}.Pixels(width, height),
		Max: Point{b.XMax, b.YMax}.Pixels(width, height),
	}
}

// Size is how far something extends, as shares of the picture's width and height.
type Size struct {
	Width, Height float32
}

// SpatialRef is a place that a question is about: a [Point] or a [Box].
type SpatialRef interface{ spatialRef() *legatov1.SpatialRef }

func (p Point) spatialRef() *legatov1.SpatialRef {
	return &legatov1.SpatialRef{Ref: &legatov1.SpatialRef_Point{Point: &legatov1.Point{X: p.X, Y: p.Y}}}
}

func (b Box) spatialRef() *legatov1.SpatialRef {
	box := &legatov1.Box{XMin: b.XMin, YMin: b.YMin, XMax: b.XMax, YMax: b.YMax}
	return &legatov1.SpatialRef{Ref: &legatov1.SpatialRef_Box{Box: box}}
}

func scale(share float32, size int) int {
	return int(math.Round(float64(share) * float64(size)))
}

func pointOf(from *legatov1.Point) Point {
	return Point{from.GetX(), from.GetY()}
}

func boxOf(from *legatov1.Box) Box {
	return Box{from.GetXMin(), from.GetYMin(), from.GetXMax(), from.GetYMax()}
}
