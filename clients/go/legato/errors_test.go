package legato

import (
	"context"
	"errors"
	"testing"
	"time"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"
)

func refusal(t *testing.T, code codes.Code, details ...protoadapt.MessageV1) error {
	t.Helper()
	refused, err := status.New(code, "no").WithDetails(details...)
	if err != nil {
		t.Fatal(err)
	}
	return refused.Err()
}

// Every detail of a status becomes a field.
func TestErrorDetails(t *testing.T) {
	violation := &errdetails.BadRequest_FieldViolation{Field: "sampling.top_p", Description: "too large"}
	err := errorOf(refusal(t, codes.InvalidArgument,
		&errdetails.RequestInfo{RequestId: "r1"},
		&errdetails.ErrorInfo{Reason: "INVALID_FIELD", Metadata: map[string]string{"field": "sampling.top_p"}},
		&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{violation}},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(250 * time.Millisecond)},
	), metadata.Pairs("x-request-id", "another"))

	if err.Code != codes.InvalidArgument || err.Reason != ReasonInvalidField || err.RequestID != "r1" {
		t.Errorf("got %v, %v, %v", err.Code, err.Reason, err.RequestID)
	}
	if err.RetryAfter != 250*time.Millisecond || err.Metadata["field"] != "sampling.top_p" {
		t.Errorf("got %v, %v", err.RetryAfter, err.Metadata)
	}
	if want := (FieldViolation{"sampling.top_p", "too large"}); err.FieldViolations[0] != want {
		t.Errorf("got %v", err.FieldViolations)
	}
	if got, want := err.Error(), "legato: no [INVALID_FIELD, request r1]"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if len(status.Convert(err).Details()) != 4 {
		t.Error("the status does not keep its details")
	}
}

// The trailer names the request of a failure without details.
func TestErrorRequestIDFromTrailer(t *testing.T) {
	err := errorOf(status.Error(codes.Unavailable, "gone"), metadata.Pairs("x-request-id", "r2"))
	if err.RequestID != "r2" || err.Error() != "legato: gone [Unavailable, request r2]" {
		t.Errorf("got %v", err)
	}
}

// errors.Is asks for a code, a reason, business, or what ended the context; and for nothing else.
func TestErrorIs(t *testing.T) {
	targets := map[string]error{
		"invalid":    ErrInvalidArgument,
		"exhausted":  ErrResourceExhausted,
		"busy":       ErrBusy,
		"queue full": ReasonQueueFull,
		"deadline":   context.DeadlineExceeded,
		"cancelled":  context.Canceled,
		"incomplete": ErrIncompleteStream,
	}
	cases := []struct {
		err  *Error
		want []string
	}{
		{misuse("tasks", "empty"), []string{"invalid"}},
		{&Error{Code: codes.ResourceExhausted}, []string{"exhausted"}},
		{&Error{Code: codes.ResourceExhausted, Reason: ReasonQueueFull}, []string{"exhausted", "busy", "queue full"}},
		{&Error{Code: codes.ResourceExhausted, RetryAfter: 1}, []string{"exhausted", "busy"}},
		{&Error{Code: codes.DeadlineExceeded}, []string{"deadline"}},
		{&Error{Code: codes.Canceled}, []string{"cancelled"}},
		{incomplete("cut"), []string{"incomplete"}},
	}
	for _, c := range cases {
		wanted := map[string]bool{}
		for _, name := range c.want {
			wanted[name] = true
		}
		for name, target := range targets {
			if got := errors.Is(c.err, target); got != wanted[name] {
				t.Errorf("%v is %s: %v", c.err, name, got)
			}
		}
	}
}

// The reasons listed are those of the contract.
func TestReasonsAreThoseOfTheContract(t *testing.T) {
	listed := []Reason{
		ReasonInvalidField, ReasonImageUndecodable, ReasonImageTooLarge, ReasonImageNotFound, ReasonModelNotFound,
		ReasonAdapterNotFound, ReasonTaskUnsupported, ReasonPromptTooLong, ReasonQueueFull, ReasonQuotaExceeded,
		ReasonClientTooSlow, ReasonDeadlineUnreachable, ReasonDuplicateRequest, ReasonEngineStarting,
		ReasonEngineLost, ReasonDraining, ReasonPreempted, ReasonSharedMemoryRefused, ReasonSharedMemoryTorn,
		ReasonSessionProtocol, ReasonUnauthenticated, ReasonForbidden, ReasonInternal, ReasonPoisoned,
		ReasonNumeric,
	}
	for _, reason := range listed {
		if legatov1.ErrorReason_value["ERROR_REASON_"+string(reason)] == 0 {
			t.Errorf("the contract lacks %s", reason)
		}
	}
	if got, want := len(listed), len(legatov1.ErrorReason_name)-1; got != want {
		t.Errorf("%d reasons, the contract has %d", got, want)
	}
}
