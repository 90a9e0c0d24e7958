package legato

import (
	"net/url"
	"strconv"
	"time"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/durationpb"
)

// affinityKey is the metadata by which a proxy sends calls about one picture, or of one session, to one server.
const affinityKey = "legato-affinity"

// Option adds to a call of one skill: a [TaskOption] or a [CallOption].
type Option interface{ apply(*settings) }

// TaskOption adds to a task.
type TaskOption interface {
	Option
	forTask()
}

// CallOption adds to a call as a whole.
type CallOption interface {
	Option
	forCall()
}

type settings struct {
	task Task
	call callSettings
}

type callSettings struct {
	options *legatov1.RequestOptions
	stamp   *legatov1.FrameStamp
	header  metadata.MD
}

type taskOption func(*Task)

func (set taskOption) apply(s *settings) { set(&s.task) }
func (taskOption) forTask()              {}

type callOption func(*callSettings)

func (set callOption) apply(s *settings) { set(&s.call) }
func (callOption) forCall()              {}

// ---------------------------------------------------------------- tasks

// WithTaskID names a task in its result, at most 64 characters.
func WithTaskID(id string) TaskOption {
	return taskOption(func(t *Task) { t.message.TaskId = id })
}

// WithMaxObjects bounds what a detection or pointing finds, at least 1.
func WithMaxObjects(count uint32) TaskOption {
	return taskOption(func(t *Task) {
		switch kind := t.message.Kind.(type) {
		case *legatov1.Task_Detect:
			kind.Detect.MaxObjects = &count
		case *legatov1.Task_Point:
			kind.Point.MaxObjects = &count
		default:
			t.wrong = misuse("max_objects", "only a detection or pointing has it")
		}
	})
}

// WithTracking has the objects of a detection followed from frame to frame of a session: [Detection.TrackID],
// [Detection.Motion], [Session.Now]. A track waits for its object for maxUnseen, at most a minute; 0 is the server's
// choice. Only for the tasks of a [SessionConfig] and of [Session.Update].
func WithTracking(maxUnseen time.Duration) TaskOption {
	return taskOption(func(t *Task) {
		if detect := t.message.GetDetect(); detect != nil {
			detect.Tracking = &legatov1.Tracking{MaxUnseen: duration(maxUnseen)}
		} else {
			t.wrong = misuse("tracking", "only a detection has it")
		}
	})
}

// WithMinConfidence leaves out what a detection or pointing finds with a lower confidence, in [0, 1].
func WithMinConfidence(confidence float32) TaskOption {
	return taskOption(func(t *Task) {
		switch kind := t.message.Kind.(type) {
		case *legatov1.Task_Detect:
			kind.Detect.MinConfidence = &confidence
		case *legatov1.Task_Point:
			kind.Point.MinConfidence = &confidence
		default:
			t.wrong = misuse("min_confidence", "only a detection or pointing has it")
		}
	})
}

// WithOrder sets the order of the objects in the result of a detection or pointing.
func WithOrder(order ObjectOrder) TaskOption {
	return taskOption(func(t *Task) {
		switch kind := t.message.Kind.(type) {
		case *legatov1.Task_Detect:
			kind.Detect.Order = legatov1.ObjectOrder(order)
		case *legatov1.Task_Point:
			kind.Point.Order = legatov1.ObjectOrder(order)
		default:
			t.wrong = misuse("order", "only a detection or pointing has it")
		}
	})
}

// WithReasoning has a query think first; the thoughts are [QueryResult.Reasoning].
func WithReasoning() TaskOption {
	return taskOption(func(t *Task) {
		if query := t.message.GetQuery(); query != nil {
			query.Reasoning = true
		} else {
			t.wrong = misuse("reasoning", "only a query has it")
		}
	})
}

// WithImages asks a query about several images, in order, in place of the picture of the call: as many as [Model.MaxImages].
// They stand before the first words, or where messages of [UserParts] show them. Files are read here.
func WithImages(images ...Image) TaskOption {
	return taskOption(func(t *Task) {
		query := t.message.GetQuery()
		if query == nil {
			t.wrong = misuse("images", "only a query has several")
			return
		}
		for _, image := range images {
			frame, _ := image.(clipFrame)
			if frame.Image != nil {
				image = frame.Image
			}
			message, err := load(image)
			if err != nil {
				t.wrong = err
				return
			}
			query.Images = append(query.Images, &legatov1.QueryImage{Image: message, Time: frame.time})
		}
	})
}

// WithJSONSchema has a query answer in JSON that matches a schema; "{}" is for any.
func WithJSONSchema(schema string) TaskOption {
	return format(&legatov1.ResponseFormat{Format: &legatov1.ResponseFormat_JsonSchema{JsonSchema: schema}})
}

// WithRegex has a query answer what a regular expression matches as a whole, in the syntax of Rust.
func WithRegex(expression string) TaskOption {
	return format(&legatov1.ResponseFormat{Format: &legatov1.ResponseFormat_Regex{Regex: expression}})
}

// WithChoices has a query answer one of these texts.
func WithChoices(texts ...string) TaskOption {
	choices := &legatov1.Choices{Texts: texts}
	return format(&legatov1.ResponseFormat{Format: &legatov1.ResponseFormat_Choices{Choices: choices}})
}

// WithGrammar has a query answer what a context-free grammar allows, in GBNF or Lark.
func WithGrammar(grammar string) TaskOption {
	return format(&legatov1.ResponseFormat{Format: &legatov1.ResponseFormat_Grammar{Grammar: grammar}})
}

func format(wanted *legatov1.ResponseFormat) TaskOption {
	return taskOption(func(t *Task) {
		if query := t.message.GetQuery(); query != nil {
			query.ResponseFormat = wanted
		} else {
			t.wrong = misuse("response_format", "only a query has it")
		}
	})
}

// WithRefs names the places that a query, pointing or segmentation is about.
func WithRefs(refs ...SpatialRef) TaskOption {
	return taskOption(func(t *Task) {
		places := make([]*legatov1.SpatialRef, len(refs))
		for i, ref := range refs {
			places[i] = ref.spatialRef()
		}
		if field := refsOf(t.message); field != nil {
			*field = places
		} else {
			t.wrong = misuse("spatial_refs", "only a query, pointing or segmentation has them")
		}
	})
}

// WithTemperature spreads the choice of tokens; 0 always takes the likeliest.
func WithTemperature(temperature float32) TaskOption {
	return sampling(func(s *legatov1.Sampling) { s.Temperature = &temperature })
}

// WithTopP samples among the likeliest tokens that together have this probability, in (0, 1].
func WithTopP(probability float32) TaskOption {
	return sampling(func(s *legatov1.Sampling) { s.TopP = &probability })
}

// WithTopK samples among this many likeliest tokens.
func WithTopK(count uint32) TaskOption {
	return sampling(func(s *legatov1.Sampling) { s.TopK = &count })
}

// WithMaxTokens bounds the tokens generated, at least 1.
func WithMaxTokens(count uint32) TaskOption {
	return sampling(func(s *legatov1.Sampling) { s.MaxTokens = &count })
}

// WithSeed makes sampling repeatable.
func WithSeed(seed uint64) TaskOption {
	return sampling(func(s *legatov1.Sampling) { s.Seed = &seed })
}

// WithStop ends a query or caption where one of these texts appears, at most 8.
func WithStop(texts ...string) TaskOption {
	return sampling(func(s *legatov1.Sampling) { s.Stop = texts })
}

func sampling(set func(*legatov1.Sampling)) TaskOption {
	return taskOption(func(t *Task) {
		if t.message.Sampling == nil {
			t.message.Sampling = &legatov1.Sampling{}
		}
		set(t.message.Sampling)
	})
}

// ---------------------------------------------------------------- calls

// WithRequestID names the request; a UUID4 is best. A unary call repeated with its id has the same answer.
func WithRequestID(id string) CallOption {
	return callOption(func(c *callSettings) { c.options.RequestId = id })
}

// WithModel asks a model other than the default one; see [Client.Models].
func WithModel(name string) CallOption {
	return callOption(func(c *callSettings) { c.options.Model = name })
}

// WithAdapter asks a fine-tune, "{finetune_id}@{step}".
func WithAdapter(name string) CallOption {
	return callOption(func(c *callSettings) { c.options.Adapter = name })
}

// WithStamp has the answer echo where and when the picture was taken.
func WithStamp(stamp FrameStamp) CallOption {
	return callOption(func(c *callSettings) { c.stamp = stamp.message() })
}

// WithoutImageCache keeps the server from keeping the picture's encoding.
func WithoutImageCache() CallOption {
	keep := false
	return callOption(func(c *callSettings) { c.options.CacheImage = &keep })
}

// WithTokens has every token told that was sampled: in [Info.Tokens], and while a stream decodes.
func WithTokens() CallOption {
	return callOption(func(c *callSettings) { c.options.ReturnTokens = true })
}

// WithLogprobs has every token told with its [Token.Logprob], where the server has the capability "logprobs".
func WithLogprobs() CallOption {
	alternatives := uint32(0)
	return callOption(func(c *callSettings) { c.options.TopLogprobs = &alternatives })
}

// WithAlternatives is [WithLogprobs] with as many [Token.Alternatives], at most 20.
func WithAlternatives(count uint32) CallOption {
	return callOption(func(c *callSettings) { c.options.TopLogprobs = &count })
}

// WithHeartbeat bounds the silence of a stream, at least 100 ms.
func WithHeartbeat(interval time.Duration) CallOption {
	return callOption(func(c *callSettings) { c.options.HeartbeatInterval = durationpb.New(interval) })
}

// WithPriority lets a call go before those of a lower priority, where the server heeds it; 0 is the usual one.
func WithPriority(priority int) CallOption {
	return header("legato-priority", strconv.Itoa(priority))
}

// WithTenant names whom a call is for, in a server's quotas and metrics.
func WithTenant(name string) CallOption {
	return header("legato-tenant", name)
}

func header(key, value string) CallOption {
	return callOption(func(c *callSettings) { c.set(key, value) })
}

func (c *callSettings) set(key, value string) {
	if c.header == nil {
		c.header = metadata.MD{}
	}
	c.header.Set(key, value)
}

// stayWith has a proxy send the call to the server that holds the picture.
func (c *callSettings) stayWith(picture *legatov1.Image) {
	if id := picture.GetImageId(); id != "" {
		c.set(affinityKey, url.QueryEscape(id))
	}
}
