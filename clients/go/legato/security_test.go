package legato

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	legatov1 "github.com/legato-vlm/legato/clients/go/legato/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	goodToken = "legato_robot-7_Zm9vYmFyYmF6cXV4cXV1eA"
	nextToken = "legato_robot-7_c2Vjb25kc2Vjb25kc2Vjb25k"
)

// authority makes certificates in files of a test.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	folder      string
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	made := &authority{folder: t.TempDir()}
	template := &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	made.certificate, made.key = made.sign(t, template, "ca")
	return made
}

func (a *authority) file(name string) string { return filepath.Join(a.folder, name+".pem") }

// issue writes name.pem and name-key.pem, for the loopback and for both uses.
func (a *authority) issue(t *testing.T, name string) (certFile, keyFile string) {
	t.Helper()
	a.sign(t, &x509.Certificate{
		Subject:     pkix.Name{CommonName: name},
		DNSNames:    []string{"localhost"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, name)
	return a.file(name), a.file(name + "-key")
}

func (a *authority) sign(t *testing.T, template *x509.Certificate, name string) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template.SerialNumber = big.NewInt(time.Now().UnixNano())
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent, signer := a.certificate, a.key
	if parent == nil {
		parent, signer = template, key
	}
	data, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{
		a.file(name):          {Type: "CERTIFICATE", Bytes: data},
		a.file(name + "-key"): {Type: "PRIVATE KEY", Bytes: private},
	} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	made, err := x509.ParseCertificate(data)
	if err != nil {
		t.Fatal(err)
	}
	return made, key
}

// secureFake is a server that answers detections and sessions, and notes the tokens that come.
type secureFake struct {
	address string
	mutex   sync.Mutex
	seen    []string
}

func (f *secureFake) check(ctx context.Context) error {
	own, _ := metadata.FromIncomingContext(ctx)
	token := strings.TrimPrefix(strings.Join(own.Get("authorization"), ","), "Bearer ")
	f.mutex.Lock()
	f.seen = append(f.seen, token)
	f.mutex.Unlock()
	if token != goodToken && token != nextToken {
		return status.Error(codes.Unauthenticated, "the credential is not valid")
	}
	return nil
}

// serveSecure serves with TLS, and asks for clients' certificates if clients is an authority.
func serveSecure(t *testing.T, issuer, clients *authority) *secureFake {
	t.Helper()
	certFile, keyFile := issuer.issue(t, "server")
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	config := &tls.Config{Certificates: []tls.Certificate{pair}}
	if clients != nil {
		config.ClientAuth, config.ClientCAs = tls.RequireAndVerifyClientCert, x509.NewCertPool()
		config.ClientCAs.AddCert(clients.certificate)
	}
	return servePrivate(t, grpc.Creds(credentials.NewTLS(config)))
}

func servePrivate(t *testing.T, options ...grpc.ServerOption) *secureFake {
	t.Helper()
	checks := &secureFake{}
	options = append(options,
		grpc.UnaryInterceptor(func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			if err := checks.check(ctx); err != nil {
				return nil, err
			}
			return next(ctx, request)
		}),
		grpc.StreamInterceptor(func(service any, stream grpc.ServerStream, about *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			if strings.Contains(about.FullMethod, "Health") {
				return status.Error(codes.Unimplemented, "not here")
			}
			if err := checks.check(stream.Context()); err != nil {
				return err
			}
			return next(service, stream)
		}))
	answers := &fake{
		detect: func(context.Context, *legatov1.DetectRequest) (*legatov1.DetectResponse, error) {
			return &legatov1.DetectResponse{Info: &legatov1.ResponseInfo{}}, nil
		},
		session: func(stream grpc.BidiStreamingServer[legatov1.SessionRequest, legatov1.SessionResponse]) error {
			opened := &legatov1.SessionOpened{SessionId: "s", FrameCredits: 1}
			return stream.Send(&legatov1.SessionResponse{Message: &legatov1.SessionResponse_Opened{Opened: opened}})
		},
	}
	server := grpc.NewServer(options...)
	legatov1.RegisterInferenceServiceServer(server, answers)
	legatov1.RegisterSessionServiceServer(server, answers)
	legatov1.RegisterServerServiceServer(server, answers)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	checks.address = listener.Addr().String()
	return checks
}

func detectOnce(t *testing.T, address string, options ...DialOption) error {
	t.Helper()
	client, err := Dial(address, append(options, WithTimeout(10*time.Second))...)
	if err != nil {
		return err
	}
	defer client.Close()
	_, err = client.Detect(t.Context(), Bytes([]byte{0xff, 0xd8, 0xff}), "cat")
	return err
}

// Unary calls and sessions over TLS carry the token, by every way to name the authority.
func TestTLSWithToken(t *testing.T) {
	issuer := newAuthority(t)
	server := serveSecure(t, issuer, nil)
	pool := x509.NewCertPool()
	pool.AddCert(issuer.certificate)
	for _, named := range []DialOption{WithCA(issuer.file("ca")), WithTLS(&tls.Config{RootCAs: pool})} {
		client, err := Dial(server.address, WithToken(goodToken), named)
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		if _, err := client.Detect(t.Context(), Bytes([]byte{0xff, 0xd8, 0xff}), "cat"); err != nil {
			t.Fatal(err)
		}
		session, err := client.OpenSession(t.Context(), SessionConfig{Tasks: []Task{DetectTask("cat")}})
		if err != nil {
			t.Fatal(err)
		}
		session.Close()
		if _, err := client.ServerInfo(t.Context()); err != nil {
			t.Fatal(err)
		}
		if text := fmt.Sprintf("%+v %#v", client, client); strings.Contains(text, goodToken) {
			t.Fatal("the client shows its token")
		}
	}
	for _, token := range server.seen {
		if token != goodToken {
			t.Fatalf("got the tokens %q", server.seen)
		}
	}
}

// A server that asks for a certificate serves who has one of its authority, whatever the order of the options.
func TestClientCertificate(t *testing.T) {
	issuer, clients := newAuthority(t), newAuthority(t)
	server := serveSecure(t, issuer, clients)
	certFile, keyFile := clients.issue(t, "robot-7")
	ca, own, token := WithCA(issuer.file("ca")), WithClientCertificate(certFile, keyFile), WithToken(goodToken)
	for _, options := range [][]DialOption{{ca, own, token}, {own, WithTLS(nil), ca, token}, {own, ca, WithTLS(nil), token}} {
		if err := detectOnce(t, server.address, options...); err != nil {
			t.Fatal(err)
		}
	}
	if err := detectOnce(t, server.address, ca, token); !errors.Is(err, ErrUnavailable) {
		t.Fatalf("without a certificate: %v", err)
	}
}

// A server of another authority gets no call, and no token.
func TestUnknownAuthority(t *testing.T) {
	server := serveSecure(t, newAuthority(t), nil)
	for _, trust := range []DialOption{WithTLS(nil), WithCA(newAuthority(t).file("ca"))} {
		err := detectOnce(t, server.address, trust, WithToken(goodToken))
		if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "certificate") {
			t.Fatalf("got %v", err)
		}
	}
	if len(server.seen) > 0 {
		t.Fatalf("it got %q", server.seen)
	}
}

// A call without a valid token is ErrUnauthenticated.
func TestInvalidToken(t *testing.T) {
	server := servePrivate(t)
	for _, options := range [][]DialOption{nil, {WithToken("legato_robot-7_wrong")}} {
		if err := detectOnce(t, server.address, options...); !errors.Is(err, ErrUnauthenticated) {
			t.Fatalf("got %v", err)
		}
	}
	if err := detectOnce(t, server.address, WithToken("two words")); err == nil || strings.Contains(err.Error(), "two words") {
		t.Fatalf("got %v", err)
	}
}

// Without TLS a token goes to this host only; the refusal comes before any connection.
func TestUnencryptedToken(t *testing.T) {
	server := servePrivate(t)
	if err := detectOnce(t, server.address, WithToken(goodToken)); err != nil {
		t.Fatal(err)
	}
	_, err := Dial("robots.example:50051", WithToken(goodToken))
	if !errors.Is(err, ErrUnencryptedToken) || strings.Contains(err.Error(), goodToken) {
		t.Fatalf("got %v", err)
	}
	if _, err := Dial("robots.example:50051", WithToken(goodToken), WithTLS(nil)); err != nil {
		t.Fatal(err)
	}
}

// Whatever is not certain to be this host is not.
func TestLocalTargets(t *testing.T) {
	for target, local := range map[string]bool{
		"localhost:50051": true, "LOCALHOST": true, "127.0.0.1:50051": true, "127.9.9.9:1": true,
		"[::1]:50051": true, "::1": true, "unix:/run/legato.sock": true, "unix:///run/legato.sock": true,
		"unix-abstract:legato": true, "dns:///localhost:50051": true, "passthrough:///127.0.0.1:1": true,
		"robots.example:50051": false, "10.0.0.7:50051": false, "0.0.0.0:1": false, "[::]:1": false,
		"localhost.example:1": false, "127.0.0.1.example:1": false, "127.0.0.1:1@robots.example": false,
		"dns://8.8.8.8/localhost:1": false, "xds:///localhost": false, "127.0.0.1:1,robots.example:1": false, "": false,
	} {
		if isLocal(target) != local {
			t.Errorf("%q: got %v", target, !local)
		}
	}
}

// A token file is read again when it changes, with or without the mark of editors before UTF-8; what is not there is an error of Dial, and later of the call.
func TestTokenFile(t *testing.T) {
	server, path := servePrivate(t), filepath.Join(t.TempDir(), "token")
	if _, err := Dial(server.address, WithTokenFile(path)); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("got %v", err)
	}
	write := func(token string) {
		if err := os.WriteFile(path+".new", []byte(token+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	write(goodToken)
	client, err := Dial(server.address, WithTokenFile(path), WithTimeout(10*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	for _, content := range []string{goodToken, "\ufeff" + nextToken + "\r"} {
		write(content)
		if _, err := client.Detect(t.Context(), Bytes([]byte{0xff, 0xd8, 0xff}), "cat"); err != nil {
			t.Fatal(err)
		}
	}
	if server.seen[0] != goodToken || server.seen[1] != nextToken {
		t.Fatalf("got %q", server.seen)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Detect(t.Context(), Bytes([]byte{0xff, 0xd8, 0xff}), "cat"); !errors.Is(err, ErrUnauthenticated) {
		t.Fatalf("got %v", err)
	}
}

// Files that are no certificates are errors of Dial, by name.
func TestUnreadableCertificates(t *testing.T) {
	path := filepath.Join(t.TempDir(), "junk.pem")
	if err := os.WriteFile(path, []byte("junk"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, option := range []DialOption{WithCA(path), WithCA(path + "x"), WithClientCertificate(path, path)} {
		if _, err := Dial("127.0.0.1:1", option); err == nil {
			t.Error("it was accepted")
		}
	}
}

// A real server with TLS and tokens answers, and refuses a client without a token. The environment names it.
func TestSecuredServer(t *testing.T) {
	address := os.Getenv("LEGATO_SECURED_SERVER")
	if address == "" {
		t.Skip("needs a server with TLS and tokens: LEGATO_SECURED_SERVER=host:port and its files")
	}
	secured := []DialOption{
		WithCA(os.Getenv("LEGATO_SECURED_CA")),
		WithClientCertificate(os.Getenv("LEGATO_SECURED_CERT"), os.Getenv("LEGATO_SECURED_KEY")),
	}
	client, err := Dial(address, append(secured, WithTokenFile(os.Getenv("LEGATO_SECURED_TOKEN_FILE")))...)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if _, err := client.Query(t.Context(), nil, "how many?"); err != nil {
		t.Fatal(err)
	}
	for _, err := range client.Generate(t.Context(), nil, QueryTask("how many?")) {
		if err != nil {
			t.Fatal(err)
		}
	}
	session, err := client.OpenSession(t.Context(), SessionConfig{Tasks: []Task{DetectTask("cup")}})
	if err != nil {
		t.Fatal(err)
	}
	session.Close()
	without, err := Dial(address, append(secured, WithToken("legato_nobody_wrong"))...)
	if err != nil {
		t.Fatal(err)
	}
	defer without.Close()
	if _, err := without.Query(t.Context(), nil, "how many?"); !errors.Is(err, ErrUnauthenticated) {
		t.Fatalf("without a valid token: %v", err)
	}
}

// A server on this host is reached past the proxy of the environment, which is read once: in a process of its own.
func TestAServerOnThisHostIsReachedPastTheProxy(t *testing.T) {
	if os.Getenv("LEGATO_TEST_PROXY") == "" {
		command := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
		proxy := "=http://127.0.0.1:1"
		command.Env = append(os.Environ(), "LEGATO_TEST_PROXY=1", "http_proxy"+proxy, "https_proxy"+proxy)
		if said, err := command.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, said)
		}
		return
	}
	info, err := (&fake{}).dial(t).ServerInfo(context.Background())
	if err != nil || info.Name != "fake" {
		t.Fatal(info, err)
	}
}
