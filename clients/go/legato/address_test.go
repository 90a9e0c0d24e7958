package legato

import (
	"strings"
	"testing"
)

// Dial refuses what no server can be reached at, and says what to write instead.
func TestDialRefusesAddresses(t *testing.T) {
	for target, said := range map[string]string{
		"":                           "host:port",
		"robots.example":             "host:port",
		"robots.example:":            "host:port",
		":50051":                     "host:port",
		"robots.example:x":           "host:port",
		"robots.example:70000":       "host:port",
		"::1":                        "host:port",
		"http://robots.example:80":   `"robots.example:80" instead of`,
		"HTTPS://robots.example:80/": `"robots.example:80" instead of`,
		"grpc://robots.example":      "no URL",
	} {
		client, err := Dial(target)
		if err == nil {
			client.Close()
			t.Errorf("Dial(%q) succeeded", target)
		} else if !strings.Contains(err.Error(), said) {
			t.Errorf("Dial(%q): %v", target, err)
		}
	}
}

// Dial takes every target that gRPC resolves.
func TestDialTakesAddresses(t *testing.T) {
	for _, target := range []string{
		"127.0.0.1:50051", "localhost:50051", "[::1]:50051", "dns:50051", "dns:robots.example", "dns:///robots.example:50051",
		"dns://127.0.0.1/robots.example:50051", "unix:/run/legato.sock", "unix:///run/legato.sock", "unix-abstract:legato",
		"passthrough:///bufnet", "custom:///anything",
	} {
		client, err := Dial(target)
		if err != nil {
			t.Errorf("Dial(%q): %v", target, err)
			continue
		}
		client.Close()
	}
}
