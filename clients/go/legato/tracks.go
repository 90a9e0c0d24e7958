package legato

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"sync"
	"time"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
)

// defaultUnseen is what the contract says of an absent Tracking.max_unseen.
const defaultUnseen = 2 * time.Second

// TrackNow is a tracked object at the moment of [Session.Now], Age after it was last found.
type TrackNow struct {
	// Place is where it is expected, Deviation the standard deviation of that.
	Place, Deviation BoxAxes
	Age              time.Duration
	// Last is what the model found, in frame Sequence, for task TaskID. It has the label and the track's id.
	Last     *Detection
	Sequence uint64
	TaskID   string
}

// Box is where it is expected, perhaps beyond the picture.
func (t *TrackNow) Box() Box { return t.Place.Box() }

// trackMemory is the newest state of each track, until its object was not found for the task's max_unseen. Times are
// those of the stamps; a frame whose stamp has none counts as captured when it is sent.
type trackMemory struct {
	mutex   sync.Mutex
	tasks   map[taskKey]time.Duration
	seen    map[string]seenTrack
	sendAts map[uint64]time.Time // of open frames whose stamps have no time
}

type taskKey struct{ id, object string }

type seenTrack struct {
	found    *Detection
	task     taskKey
	sequence uint64
	captured time.Time
}

// use forgets the tracks of all other tasks.
func (m *trackMemory) use(tasks []*legatov1.Task) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.tasks = map[taskKey]time.Duration{}
	for _, task := range tasks {
		if tracking := task.GetDetect().GetTracking(); tracking != nil {
			m.tasks[taskKey{task.TaskId, task.GetDetect().Object}] = unseenOf(tracking)
		}
	}
	for id, each := range m.seen {
		if _, follows := m.tasks[each.task]; !follows {
			delete(m.seen, id)
		}
	}
}

func (m *trackMemory) sent(stamp *legatov1.FrameStamp) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if stamp.CaptureTime == nil && len(m.tasks) > 0 {
		put(&m.sendAts, stamp.Sequence, time.Now())
	}
}

// settled: no more results of this frame will come.
func (m *trackMemory) settled(sequence uint64) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	delete(m.sendAts, sequence)
}

func (m *trackMemory) received(event *FrameResult) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	captured := event.Stamp.CaptureTime
	if captured.IsZero() {
		captured = m.sendAts[event.Stamp.Sequence]
	}
	result, isDetection := event.Result.(*DetectResult)
	if captured.IsZero() || !isDetection {
		return
	}
	for _, found := range result.Objects {
		each := seenTrack{found, taskKey{event.TaskID, found.Label}, event.Stamp.Sequence, captured}
		_, follows := m.tasks[each.task]
		if found.Motion != nil && follows && !m.seen[found.TrackID].captured.After(captured) {
			put(&m.seen, found.TrackID, each)
		}
	}
	for id, each := range m.seen {
		if !m.lives(each, captured) {
			delete(m.seen, id)
		}
	}
}

func (m *trackMemory) now(at time.Time) []TrackNow {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	var tracks []TrackNow
	for _, each := range m.seen {
		if m.lives(each, at) {
			age := max(at.Sub(each.captured), 0)
			place, deviation := each.found.Motion.After(age)
			tracks = append(tracks, TrackNow{place, deviation, age, each.found, each.sequence, each.task.id})
		}
	}
	slices.SortFunc(tracks, func(a, b TrackNow) int { return cmp.Compare(number(a), number(b)) })
	return tracks
}

// lives is also false far ahead of the track's time: the clock was set back since.
func (m *trackMemory) lives(each seenTrack, at time.Time) bool {
	return at.Sub(each.captured).Abs() <= m.tasks[each.task]
}

// number is the order of the tracks' beginnings.
func number(track TrackNow) int {
	number, _ := strconv.Atoi(track.Last.TrackID)
	return number
}

func unseenOf(tracking *legatov1.Tracking) time.Duration {
	if tracking.MaxUnseen == nil {
		return defaultUnseen
	}
	return tracking.MaxUnseen.AsDuration()
}

func put[Key comparable, Value any](into *map[Key]Value, key Key, value Value) {
	if *into == nil {
		*into = map[Key]Value{}
	}
	(*into)[key] = value
}

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
