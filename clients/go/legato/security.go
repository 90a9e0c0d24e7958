package legato

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// TokenSource returns the token of a call that begins. Goroutines may call it at the same time.
type TokenSource func(context.Context) (string, error)

// WithTLS encrypts the connection. nil is the system's own configuration. [WithCA] and [WithClientCertificate] add to
// it, in any order.
func WithTLS(config *tls.Config) DialOption {
	return func(s *dialSettings) {
		added := s.tls
		s.tls = &tls.Config{}
		if config != nil {
			s.tls = config.Clone()
		}
		if added != nil && added.RootCAs != nil {
			s.tls.RootCAs = added.RootCAs
		}
		if added != nil && added.Certificates != nil {
			s.tls.Certificates = added.Certificates
		}
	}
}

// WithCA encrypts the connection, and trusts the authorities of a PEM file instead of the system's.
func WithCA(file string) DialOption {
	return func(s *dialSettings) {
		pem, err := os.ReadFile(file)
		pool := x509.NewCertPool()
		if err == nil && !pool.AppendCertsFromPEM(pem) {
			err = fmt.Errorf("%s holds no certificate in PEM form", file)
		}
		s.encrypt(err).RootCAs = pool
	}
}

// WithClientCertificate encrypts the connection, and shows the certificate to servers that ask for one.
func WithClientCertificate(certFile, keyFile string) DialOption {
	return func(s *dialSettings) {
		pair, err := tls.LoadX509KeyPair(certFile, keyFile)
		s.encrypt(err).Certificates = []tls.Certificate{pair}
	}
}

// WithToken sends a bearer token with every call. Without TLS that is an error of [Dial], [ErrUnencryptedToken], unless
// the target is certain to be on this host.
func WithToken(token string) DialOption {
	return WithTokenSource(func(context.Context) (string, error) { return token, nil })
}

// WithTokenFile is as [WithToken], with the token in a file, which is read again when it changes.
func WithTokenFile(file string) DialOption {
	return func(s *dialSettings) {
		read := &tokenFile{path: file}
		if _, err := read.token(context.Background()); err != nil {
			s.fail(err)
		}
		s.token = read.token
	}
}

// WithTokenSource is as [WithToken], with a token that may change from call to call.
func WithTokenSource(source TokenSource) DialOption {
	return func(s *dialSettings) { s.token = source }
}

func (s *dialSettings) encrypt(err error) *tls.Config {
	s.fail(err)
	if s.tls == nil {
		s.tls = &tls.Config{}
	}
	return s.tls
}

func (s *dialSettings) fail(err error) {
	if s.err == nil && err != nil {
		s.err = fmt.Errorf("legato: %w", err)
	}
}

// security is the options of gRPC for TLS and the token.
func (s dialSettings) security(target string) ([]grpc.DialOption, error) {
	if s.err != nil {
		return nil, s.err
	}
	transport := insecure.NewCredentials()
	if s.tls != nil {
		transport = credentials.NewTLS(s.tls)
	}
	options := []grpc.DialOption{grpc.WithTransportCredentials(transport)}
	if s.token == nil {
		return options, nil
	}
	local := s.tls == nil
	if local && !isLocal(target) {
		return nil, fmt.Errorf("%w: use TLS for %s", ErrUnencryptedToken, target)
	}
	return append(options, grpc.WithPerRPCCredentials(bearer{s.token, !local})), nil
}

type bearer struct {
	source TokenSource // a function, so that no formatting shows the token
	secure bool
}

// GetRequestMetadata leaves out gRPC's own watch of the servers' health, which needs no token: a token that cannot be
// had would keep it from ever calling a server healthy, and calls would wait instead of failing.
func (b bearer) GetRequestMetadata(ctx context.Context, services ...string) (map[string]string, error) {
	if slices.ContainsFunc(services, isHealth) {
		return nil, nil
	}
	token, err := b.source(ctx)
	if err != nil {
		return nil, err
	}
	if !isToken(token) {
		// The transport's own error would show it.
		return nil, errors.New("a token is 1 to 8192 printable ASCII characters without spaces")
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

func isHealth(service string) bool { return strings.HasSuffix(service, "/grpc.health.v1.Health") }

func (b bearer) RequireTransportSecurity() bool { return b.secure }

func isToken(token string) bool {
	return 0 < len(token) && len(token) <= 8192 &&
		strings.IndexFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) < 0
}

type tokenFile struct {
	path string

	mutex   sync.Mutex
	changed time.Time
	size    int64
	content func() string // hidden from formatting; nil before the first read
}

func (f *tokenFile) token(context.Context) (string, error) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	about, err := os.Stat(f.path)
	if err != nil {
		return "", err
	}
	if f.content != nil && about.ModTime().Equal(f.changed) && about.Size() == f.size {
		return f.content(), nil
	}
	text, err := os.ReadFile(f.path)
	if err != nil {
		return "", err
	}
	token := strings.TrimSpace(strings.TrimPrefix(string(text), "\ufeff")) // editors may put a mark before UTF-8
	f.content = func() string { return token }
	f.changed, f.size = about.ModTime(), about.Size()
	return token, nil
}

// isLocal reports whether all addresses of a target are certain to be on this host.
func isLocal(target string) bool {
	scheme, rest, found := strings.Cut(target, ":")
	if found && (scheme == "unix" || scheme == "unix-abstract") {
		return true
	}
	names := target
	if found && (scheme == "dns" || scheme == "passthrough") {
		// "dns://server/name" asks a server of its own, which may say anything of localhost.
		names = strings.TrimPrefix(rest, "///")
	}
	return isLoopback(names)
}

// isLoopback reads a host, "host:port", "[address]:port" or an IPv6 address alone.
func isLoopback(name string) bool {
	host, port := name, ""
	if inner, found := strings.CutPrefix(name, "["); found {
		host, port, _ = strings.Cut(inner, "]")
		port = strings.TrimPrefix(port, ":")
	} else if strings.Count(name, ":") == 1 {
		host, port, _ = strings.Cut(name, ":")
	}
	if strings.IndexFunc(port, func(r rune) bool { return r < '0' || r > '9' }) >= 0 {
		return false
	}
	if strings.EqualFold(host, "localhost") {
		return true
	}
	address, err := netip.ParseAddr(host)
	return err == nil && address.IsLoopback()
}
