package legato

// Reason says why a call failed; the contract's ErrorReason says what to do about each. A server may send ones that
// are not listed here. A Reason is an error, so that [errors.Is] can ask for it.
type Reason string

func (r Reason) Error() string { return "legato: " + string(r) }

// The reasons of this revision of the contract.
const (
	ReasonInvalidField        Reason = "INVALID_FIELD"
	ReasonImageUndecodable    Reason = "IMAGE_UNDECODABLE"
	ReasonImageTooLarge       Reason = "IMAGE_TOO_LARGE"
	ReasonImageNotFound       Reason = "IMAGE_NOT_FOUND"
	ReasonModelNotFound       Reason = "MODEL_NOT_FOUND"
	ReasonAdapterNotFound     Reason = "ADAPTER_NOT_FOUND"
	ReasonTaskUnsupported     Reason = "TASK_UNSUPPORTED"
	ReasonPromptTooLong       Reason = "PROMPT_TOO_LONG"
	ReasonQueueFull           Reason = "QUEUE_FULL"
	ReasonQuotaExceeded       Reason = "QUOTA_EXCEEDED"
	ReasonClientTooSlow       Reason = "CLIENT_TOO_SLOW"
	ReasonDeadlineUnreachable Reason = "DEADLINE_UNREACHABLE"
	ReasonDuplicateRequest    Reason = "DUPLICATE_REQUEST"
	ReasonEngineStarting      Reason = "ENGINE_STARTING"
	ReasonEngineLost          Reason = "ENGINE_LOST"
	ReasonDraining            Reason = "DRAINING"
	ReasonPreempted           Reason = "PREEMPTED"
	ReasonSharedMemoryRefused Reason = "SHM_REFUSED"
	ReasonSharedMemoryTorn    Reason = "SHM_TORN"
	ReasonSessionProtocol     Reason = "SESSION_PROTOCOL"
	ReasonUnauthenticated     Reason = "UNAUTHENTICATED"
	ReasonForbidden           Reason = "FORBIDDEN"
	ReasonInternal            Reason = "INTERNAL"
	ReasonPoisoned            Reason = "POISONED"
	ReasonNumeric             Reason = "NUMERIC"
)
