package legato

import (
	"fmt"
	"image"
	"math"
	"regexp"
	"strconv"
	"strings"

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

// One piece of a path with the separators before it.
var pathPiece = regexp.MustCompile(`^[\s,]*([A-Za-z]|[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)`)

// Numbers that each command takes.
var pathNumbers = map[string]int{"M": 2, "L": 2, "T": 2, "H": 1, "V": 1, "S": 4, "Q": 4, "C": 6, "A": 7, "Z": 0}

type stroke struct {
	command string
	numbers []float32
}

// polygons gives the rings of an SVG path that enclose something, without a repeated last point. Curves become chords
// to their ends, which is as exact as a model's outline is.
func polygons(path string) ([][]Point, error) {
	strokes, err := strokesOf(path)
	if err != nil {
		return nil, err
	}
	var rings [][]Point
	var at Point
	closed := false
	for _, s := range strokes {
		command := strings.ToUpper(s.command)
		if command == "Z" {
			if len(rings) > 0 {
				at = rings[len(rings)-1][0]
			}
			closed = true
			continue
		}
		if len(rings) == 0 && command != "M" {
			return nil, fmt.Errorf("legato: path draws before it moves: %q", path)
		}
		if command == "M" {
			rings = append(rings, nil)
		} else if closed {
			rings = append(rings, []Point{at})
		}
		closed = false
		at = s.end(at)
		rings[len(rings)-1] = append(rings[len(rings)-1], at)
	}
	return enclosing(rings), nil
}

// end is where a stroke that begins at a point leaves the pen.
func (s stroke) end(from Point) Point {
	command := strings.ToUpper(s.command)
	base := from
	if command == s.command {
		base = Point{}
	}
	last := len(s.numbers) - 1
	switch command {
	case "H":
		return Point{base.X + s.numbers[0], from.Y}
	case "V":
		return Point{from.X, base.Y + s.numbers[0]}
	}
	return Point{base.X + s.numbers[last-1], base.Y + s.numbers[last]}
}

func enclosing(rings [][]Point) [][]Point {
	var kept [][]Point
	for _, ring := range rings {
		if last := len(ring) - 1; last > 0 && ring[0] == ring[last] {
			ring = ring[:last]
		}
		if len(ring) >= 3 {
			kept = append(kept, ring)
		}
	}
	return kept
}

// strokesOf splits a path into commands with exactly their own numbers; further numbers repeat the command.
func strokesOf(path string) ([]stroke, error) {
	var strokes []stroke
	var command string
	var numbers []float32
	for rest := path; strings.Trim(rest, " \t\r\n\f\v,") != ""; {
		match := pathPiece.FindStringSubmatch(rest)
		if match == nil {
			return nil, fmt.Errorf("legato: not a path: %q", path)
		}
		rest = rest[len(match[0]):]
		number, err := strconv.ParseFloat(match[1], 32)
		if err != nil { // a letter
			command = match[1]
			count, known := pathNumbers[strings.ToUpper(command)]
			if !known || len(numbers) > 0 {
				return nil, fmt.Errorf("legato: path has %s out of place: %q", command, path)
			}
			if count == 0 {
				strokes = append(strokes, stroke{command: command})
			}
			continue
		}
		count := pathNumbers[strings.ToUpper(command)]
		if count == 0 {
			return nil, fmt.Errorf("legato: path has a number without a command: %q", path)
		}
		if numbers = append(numbers, float32(number)); len(numbers) < count {
			continue
		}
		strokes, numbers = append(strokes, stroke{command, numbers}), nil
		switch command {
		case "M":
			command = "L"
		case "m":
			command = "l"
		}
	}
	if len(numbers) > 0 {
		return nil, fmt.Errorf("legato: path ends inside command %s: %q", command, path)
	}
	return strokes, nil
}
