package legato

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// What went wrong, by status code. A passed deadline matches [context.DeadlineExceeded] and a cancelled call
// [context.Canceled], whichever side noticed.
var (
	// ErrInvalidArgument: the request must change; [Error.FieldViolations] says where.
	ErrInvalidArgument error = codeError(codes.InvalidArgument)
	// ErrNotFound: no model, adapter or picture of this name.
	ErrNotFound error = codeError(codes.NotFound)
	// ErrAlreadyExists: the request id names another request.
	ErrAlreadyExists error = codeError(codes.AlreadyExists)
	// ErrFailedPrecondition: this server cannot do that, whatever the arguments.
	ErrFailedPrecondition error = codeError(codes.FailedPrecondition)
	// ErrResourceExhausted: a limit of the server, the transport or a proxy; see also [ErrBusy].
	ErrResourceExhausted error = codeError(codes.ResourceExhausted)
	// ErrAborted: the server gave up: preempted, or this client read too slowly.
	ErrAborted error = codeError(codes.Aborted)
	// ErrUnavailable: no server is ready at that address.
	ErrUnavailable error = codeError(codes.Unavailable)
	// ErrUnimplemented: this server was not built with that call.
	ErrUnimplemented error = codeError(codes.Unimplemented)
	// ErrUnauthenticated: no credentials, or bad ones.
	ErrUnauthenticated error = codeError(codes.Unauthenticated)
	// ErrPermissionDenied: the credentials lack a scope.
	ErrPermissionDenied error = codeError(codes.PermissionDenied)
	// ErrInternal: a bug of the server; its log has more under [Error.RequestID].
	ErrInternal error = codeError(codes.Internal)
)

var (
	// ErrBusy: the server is full, or a quota is used up; come back after [Error.RetryAfter].
	ErrBusy = errors.New("legato: the server is busy")
	// ErrUnencryptedToken: a token would leave this host unencrypted; nothing was sent.
	ErrUnencryptedToken = errors.New("legato: a token would leave this host unencrypted")
	// ErrIncompleteStream: a stream lost a message, or ended before its answer did.
	ErrIncompleteStream = errors.New("legato: the stream is incomplete")
)

type codeError codes.Code

func (c codeError) Error() string { return "legato: " + codes.Code(c).String() }

// Error is a call's failure.
type Error struct {
	// Code decides what a generic program does about it.
	Code codes.Code
	// Reason is finer than the code, and stable. Empty: gRPC itself failed.
	Reason Reason
	// Message is for people.
	Message string
	// RequestID finds the call in the server's log.
	RequestID string
	// RetryAfter is when to come back; 0 where the server does not say.
	RetryAfter time.Duration
	// Metadata holds what the message says for machines: limits, actual values, names.
	Metadata map[string]string
	// FieldViolations names the fields of the request that are wrong.
	FieldViolations []FieldViolation

	status *status.Status
	cause  error
}

// FieldViolation is a field of a request and what is wrong with it.
type FieldViolation struct {
	Field, Description string
}

func (e *Error) Error() string {
	tags := []string{string(e.Reason)}
	if e.Reason == "" {
		tags[0] = e.Code.String()
	}
	if e.RequestID != "" {
		tags = append(tags, "request "+e.RequestID)
	}
	return fmt.Sprintf("legato: %s [%s]", e.Message, strings.Join(tags, ", "))
}

// Is matches the Err values and every [Reason].
func (e *Error) Is(target error) bool {
	switch target := target.(type) {
	case codeError:
		return e.Code == codes.Code(target)
	case Reason:
		return e.Reason == target
	}
	return target == ErrBusy && e.isBusy()
}

// Unwrap gives [context.DeadlineExceeded], [context.Canceled] or [ErrIncompleteStream] where that is what happened.
func (e *Error) Unwrap() error {
	switch {
	case e.cause != nil:
		return e.cause
	case e.Code == codes.DeadlineExceeded:
		return context.DeadlineExceeded
	case e.Code == codes.Canceled:
		return context.Canceled
	}
	return nil
}

// GRPCStatus is the status as it came, for programs that read it with package status.
func (e *Error) GRPCStatus() *status.Status {
	if e.status != nil {
		return e.status
	}
	return status.New(e.Code, e.Message)
}

func (e *Error) isBusy() bool {
	if e.Code != codes.ResourceExhausted {
		return false
	}
	return e.RetryAfter > 0 || e.Reason == ReasonQueueFull || e.Reason == ReasonQuotaExceeded
}

// errorOf is the failure of an RPC; the trailer knows the request's id even where the details do not.
func errorOf(err error, trailer metadata.MD) *Error {
	failure := errorOfStatus(status.Convert(err))
	if ids := trailer.Get("x-request-id"); failure.RequestID == "" && len(ids) > 0 {
		failure.RequestID = ids[0]
	}
	return failure
}

// errorOfTask is the failure of one task of several, nil where it did not fail.
func errorOfTask(failed *rpcstatus.Status) error {
	if failed == nil {
		return nil
	}
	return errorOfStatus(status.FromProto(failed))
}

func errorOfStatus(from *status.Status) *Error {
	failure := &Error{Code: from.Code(), Message: from.Message(), status: from}
	for _, detail := range from.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			failure.Reason, failure.Metadata = Reason(detail.Reason), detail.Metadata
		case *errdetails.RequestInfo:
			failure.RequestID = detail.RequestId
		case *errdetails.RetryInfo:
			failure.RetryAfter = detail.RetryDelay.AsDuration()
		case *errdetails.BadRequest:
			for _, wrong := range detail.FieldViolations {
				violation := FieldViolation{wrong.Field, wrong.Description}
				failure.FieldViolations = append(failure.FieldViolations, violation)
			}
		}
	}
	return failure
}

// misuse is a request that this package can tell is wrong without asking the server.
func misuse(field, format string, values ...any) *Error {
	text := fmt.Sprintf(format, values...)
	return &Error{
		Code:            codes.InvalidArgument,
		Reason:          ReasonInvalidField,
		Message:         field + ": " + text,
		Metadata:        map[string]string{"field": field},
		FieldViolations: []FieldViolation{{field, text}},
	}
}

func incomplete(format string, values ...any) *Error {
	text := fmt.Sprintf(format, values...)
	return &Error{Code: codes.Unavailable, Message: text, cause: ErrIncompleteStream}
}

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
