package legato

import (
	"context"
	"slices"
	"time"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
)

// ServerInfo is what a server is and what it can do.
type ServerInfo struct {
	Name, Version string
	// InstanceID differs after each start.
	InstanceID string
	// ContractRevision is the server's; MinimumClientRevision the least that its clients must know.
	ContractRevision, MinimumClientRevision uint32
	Limits                                  Limits
	// Capabilities are words: "sessions", "images", "admin", "shared_images", "adapters", "logprobs", "tracking",
	// "pixel_format.nv12", "pixel_format.yuyv". There may be others.
	Capabilities []string
	// SharedMemory names the host's shared memory; empty where shared images are off.
	SharedMemory string
}

// Can tells whether the server has a capability.
func (s *ServerInfo) Can(capability string) bool { return slices.Contains(s.Capabilities, capability) }

// Limits are what a server accepts; 0 where it does not say.
type Limits struct {
	MaxRequestBytes  uint64
	MaxImagePixels   uint32
	MaxContextTokens uint32
	MaxOutputTokens  uint32
	MaxRunning       uint32
	MaxWaiting       uint32
	MaxSessions      uint32
	DefaultDeadline  time.Duration
}

// Model is a model that is served.
type Model struct {
	Name    string
	Aliases []string
	// Tasks are words: "query", "caption", "detect", "point", "segment", "reasoning".
	Tasks []string
	// StreamingRegions: Generate sends points and objects while it decodes.
	StreamingRegions bool
	MaxContextTokens uint32
	// Confidence is nil where no result has one.
	Confidence *ConfidenceInfo
	// Notice tells people the model's limits, once beside its answers; it is empty if there is nothing to say.
	Notice string
	// MaxImages of a query; 0: a model of text.
	MaxImages uint32
}

// ConfidenceInfo is how the confidences of a model are to be read.
type ConfidenceInfo struct {
	// Tasks have them; those of CalibratedTasks are shares of objects that are right, the others only order objects.
	Tasks, CalibratedTasks []string
	// FittedOn names what the calibration was fitted on; it is empty, and FittedAt zero, where there is none.
	FittedOn string
	FittedAt time.Time
}

// ServerInfo asks what the server is. It answers while its engine still loads.
func (c *Client) ServerInfo(ctx context.Context) (*ServerInfo, error) {
	return invoke(ctx, c, c.server.GetServerInfo, &legatov1.GetServerInfoRequest{}, serverInfoOf)
}

// Models lists what is served, the default model first.
func (c *Client) Models(ctx context.Context) ([]Model, error) {
	ctx, cancel := withDeadline(ctx, c.settings.timeout)
	defer cancel()
	var models []Model
	same := func(page *legatov1.ListModelsResponse) *legatov1.ListModelsResponse { return page }
	for request := (&legatov1.ListModelsRequest{}); ; {
		page, err := invoke(ctx, c, c.server.ListModels, request, same)
		if err != nil {
			return nil, err
		}
		models = append(models, all(page.Models, modelOf)...)
		if request.PageToken = page.NextPageToken; request.PageToken == "" {
			return models, nil
		}
	}
}

func serverInfoOf(from *legatov1.GetServerInfoResponse) *ServerInfo {
	return &ServerInfo{
		Name:                  from.Name,
		Version:               from.Version,
		InstanceID:            from.InstanceId,
		ContractRevision:      from.ContractRevision,
		MinimumClientRevision: from.MinimumClientRevision,
		Limits:                limitsOf(from.Limits),
		Capabilities:          from.Capabilities,
		SharedMemory:          from.ShmNamespace,
	}
}

func limitsOf(from *legatov1.Limits) Limits {
	return Limits{
		MaxRequestBytes:  from.GetMaxRequestBytes(),
		MaxImagePixels:   from.GetMaxImagePixels(),
		MaxContextTokens: from.GetMaxContextTokens(),
		MaxOutputTokens:  from.GetMaxOutputTokens(),
		MaxRunning:       from.GetMaxRunning(),
		MaxWaiting:       from.GetMaxWaiting(),
		MaxSessions:      from.GetMaxSessions(),
		DefaultDeadline:  from.GetDefaultDeadline().AsDuration(),
	}
}

func modelOf(from *legatov1.Model) Model {
	return Model{
		from.Name, from.Aliases, from.Tasks, from.StreamingRegions, from.MaxContextTokens, confidenceInfoOf(from.Confidence),
		from.Notice, from.MaxImages,
	}
}

func confidenceInfoOf(from *legatov1.Confidence) *ConfidenceInfo {
	if from == nil {
		return nil
	}
	return &ConfidenceInfo{from.Tasks, from.CalibratedTasks, from.FittedOn, timeOf(from.FittedAt)}
}
