package legato

import (
	"context"
	"crypto/tls"
	_ "embed" // for the service configuration
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	_ "google.golang.org/grpc/health" // watches the servers' health, as the service config asks
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
)

// Version of this package, sent to servers.
const Version = "0.1.0"

// Deadlines of calls whose context has none, and the largest message that is sent or received.
const (
	DefaultTimeout         = 60 * time.Second
	DefaultStreamTimeout   = 10 * time.Minute
	DefaultMaxMessageBytes = 32 << 20
)

const maxAttempts = 3

// What gRPC does by itself: retries, and work only for servers that say they can do it. The Python client has the same
// file. A stream is retried only while no response has begun, so one policy serves every method.
//
//go:embed service_config.json
var serviceConfig string

// DialOption changes what [Dial] does.
type DialOption func(*dialSettings)

type dialSettings struct {
	timeout, streamTimeout time.Duration
	maxMessageBytes        int
	header                 metadata.MD
	tls                    *tls.Config // nil: not encrypted
	token                  TokenSource
	extra                  []grpc.DialOption
	err                    error // of the first option that failed
}

// WithTimeout is the deadline of unary calls whose context has none.
func WithTimeout(timeout time.Duration) DialOption {
	return func(s *dialSettings) { s.timeout = timeout }
}

// WithStreamTimeout is the deadline of Generate, from start to end, where the context has none.
func WithStreamTimeout(timeout time.Duration) DialOption {
	return func(s *dialSettings) { s.streamTimeout = timeout }
}

// WithMaxMessageBytes is the largest message that is sent or received.
func WithMaxMessageBytes(size int) DialOption {
	return func(s *dialSettings) { s.maxMessageBytes = size }
}

// WithGRPC adds gRPC's own options, after this package's.
func WithGRPC(options ...grpc.DialOption) DialOption {
	return func(s *dialSettings) { s.extra = append(s.extra, options...) }
}

func dialSettingsOf(options []DialOption) dialSettings {
	settings := dialSettings{
		timeout:         DefaultTimeout,
		streamTimeout:   DefaultStreamTimeout,
		maxMessageBytes: DefaultMaxMessageBytes,
		header:          metadata.Pairs("legato-client", "go/"+Version),
	}
	for _, option := range options {
		option(&settings)
	}
	return settings
}

func (s dialSettings) connect(target string, more ...grpc.DialOption) (*grpc.ClientConn, error) {
	secured, err := s.security(target)
	if err != nil {
		return nil, err
	}
	reconnect := backoff.DefaultConfig
	reconnect.MaxDelay = 5 * time.Second // a restarted server is found again within seconds
	options := []grpc.DialOption{
		grpc.WithDefaultServiceConfig(serviceConfig),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: reconnect, MinConnectTimeout: 5 * time.Second}),
		// Slower than the fastest ping that a Legato server allows (10 s); finds a vanished or frozen server.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(s.maxMessageBytes), grpc.MaxCallSendMsgSize(s.maxMessageBytes)),
		grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, request, answer any,
			conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
			return invoke(withHeader(ctx, s.header), method, request, answer, conn, options...)
		}),
		grpc.WithChainStreamInterceptor(func(ctx context.Context, kind *grpc.StreamDesc,
			conn *grpc.ClientConn, method string, open grpc.Streamer, options ...grpc.CallOption,
		) (grpc.ClientStream, error) {
			return open(withHeader(ctx, s.header), kind, conn, method, options...)
		}),
	}
	conn, err := grpc.NewClient(target, slices.Concat(secured, options, more, s.extra)...)
	if err != nil {
		return nil, fmt.Errorf("legato: %w", err)
	}
	return conn, nil
}

// withHeader adds to what a call sends; the caller's own values stay.
func withHeader(ctx context.Context, more metadata.MD) context.Context {
	own, _ := metadata.FromOutgoingContext(ctx)
	return metadata.NewOutgoingContext(ctx, metadata.Join(own, more))
}

// checkTarget refuses addresses that gRPC would take for names, and fail on with every call.
func checkTarget(target string) error {
	scheme, rest, found := strings.Cut(target, ":")
	switch {
	case found && strings.HasPrefix(rest, "//") && isWebScheme(scheme):
		return fmt.Errorf("legato: a server is host:port and no URL: %q instead of %q", strings.Trim(rest, "/"), target)
	case strings.Contains(target, ":///"):
		return nil // a resolver's own form
	case found && isOtherScheme(scheme) && !isPort(rest):
		return nil
	}
	host, port, err := net.SplitHostPort(target)
	if err != nil || host == "" || !isPort(port) {
		return fmt.Errorf("legato: a server is host:port, not %q", target)
	}
	return nil
}

func isWebScheme(scheme string) bool {
	switch strings.ToLower(scheme) {
	case "http", "https", "grpc", "grpcs":
		return true
	}
	return false
}

// isOtherScheme reports whether gRPC has a resolver of the name, so that "dns:50051" is a host and "dns:name" is not.
func isOtherScheme(scheme string) bool {
	switch scheme {
	case "dns", "passthrough", "unix", "unix-abstract", "vsock", "xds":
		return true
	}
	return false
}

func isPort(text string) bool {
	port, err := strconv.ParseUint(text, 10, 16)
	return err == nil && port > 0
}
