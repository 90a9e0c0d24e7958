package legato

import (
	"math"
	"time"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
)

// BoxAxes is a value for each axis of a box, as shares of the picture's width or height.
type BoxAxes struct{ CenterX, CenterY, Width, Height float64 }

// Motion is how a tracked object moved when its frame was captured, by the second, with standard deviations.
type Motion struct {
	Position, Velocity, Acceleration                            BoxAxes
	PositionDeviation, VelocityDeviation, AccelerationDeviation BoxAxes
}

// After is where the box is expected so long after the frame's capture, with its standard deviation.
func (m *Motion) After(elapsed time.Duration) (place, deviation BoxAxes) {
	t := elapsed.Seconds()
	at := func(p, v, a float64) float64 { return p + v*t + a*t*t/2 }
	spread := func(p, v, a float64) float64 { return math.Hypot(math.Hypot(p, v*t), a*t*t/2) }
	place = perAxis(at, m.Position, m.Velocity, m.Acceleration)
	return place, perAxis(spread, m.PositionDeviation, m.VelocityDeviation, m.AccelerationDeviation)
}

// Box is the box of this centre and size. It may reach beyond the picture.
func (a BoxAxes) Box() Box {
	across, down := math.Max(a.Width, 0)/2, math.Max(a.Height, 0)/2
	return Box{
		XMin: float32(a.CenterX - across),
		YMin: float32(a.CenterY - down),
		XMax: float32(a.CenterX + across),
		YMax: float32(a.CenterY + down),
	}
}

func perAxis(of func(p, v, a float64) float64, p, v, a BoxAxes) BoxAxes {
	return BoxAxes{
		CenterX: of(p.CenterX, v.CenterX, a.CenterX),
		CenterY: of(p.CenterY, v.CenterY, a.CenterY),
		Width:   of(p.Width, v.Width, a.Width),
		Height:  of(p.Height, v.Height, a.Height),
	}
}

// motionOf is nil where there is none.
func motionOf(from *legatov1.Motion) *Motion {
	if from == nil {
		return nil
	}
	return &Motion{
		Position:              axesOf(from.Position),
		Velocity:              axesOf(from.Velocity),
		Acceleration:          axesOf(from.Acceleration),
		PositionDeviation:     axesOf(from.PositionDeviation),
		VelocityDeviation:     axesOf(from.VelocityDeviation),
		AccelerationDeviation: axesOf(from.AccelerationDeviation),
	}
}

func axesOf(from *legatov1.BoxAxes) BoxAxes {
	return BoxAxes{
		CenterX: float64(from.GetCenterX()),
		CenterY: float64(from.GetCenterY()),
		Width:   float64(from.GetWidth()),
		Height:  float64(from.GetHeight()),
	}
}
