package legato

import (
	"fmt"
	"net"
	"strconv"
	"strings"
)

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
