package legato_test

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/legato-vlm/legato/clients/go/legato"
	"google.golang.org/grpc"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
)

// A stream whose server is killed after its first word goes on with another one: its words are those of a run without a
// loss, each told once. LEGATO_LOST_SERVER=host:port, slow, and LEGATO_LOST_PID name the server that is killed.
func TestLostServer(t *testing.T) {
	lost, pid, other := os.Getenv("LEGATO_LOST_SERVER"), os.Getenv("LEGATO_LOST_PID"), os.Getenv("LEGATO_SERVER")
	if lost == "" || other == "" {
		t.Skip("needs a server to kill and another one")
	}
	task := legato.QueryTask("How many?", legato.WithMaxTokens(60))
	expected, _ := listen(t, dial(t), task, nil)

	servers := manual.NewBuilderWithScheme("servers")
	servers.InitialState(addresses(lost))
	client, err := legato.Dial("servers:///both", legato.WithGRPC(grpc.WithResolvers(servers)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	words, last := listen(t, client, task, func() {
		servers.UpdateState(addresses(other)) // new streams go there; this one stays where it is
		kill(t, pid)
	}, legato.WithRequestID("robot-1"))
	answer := last.Result.(*legato.QueryResult).Answer
	if told := strings.Join(words, ""); told != strings.Join(expected, "") || told != answer {
		t.Errorf("got %q, the answer %q", words, answer)
	}
	if info := last.Info; info.Resumptions != 1 || info.RequestID != "robot-1" || info.Usage.Output != 60 {
		t.Errorf("got %+v", info)
	}
}

func addresses(each ...string) (state resolver.State) {
	for _, address := range each {
		state.Addresses = append(state.Addresses, resolver.Address{Addr: address})
	}
	return state
}

func kill(t *testing.T, pid string) {
	t.Helper()
	number, err := strconv.Atoi(pid)
	if err != nil {
		t.Fatal(err)
	}
	process, err := os.FindProcess(number)
	if err != nil {
		t.Fatal(err)
	}
	if err := process.Kill(); err != nil {
		t.Fatal(err)
	}
}

// listen returns the words of a stream and its end; afterFirst is called once.
func listen(
	t *testing.T, client *legato.Client, task legato.Task, afterFirst func(), options ...legato.CallOption,
) (words []string, last *legato.Finished) {
	t.Helper()
	for event, err := range client.Generate(t.Context(), nil, task, options...) {
		if err != nil {
			t.Fatal(err)
		}
		switch event := event.(type) {
		case *legato.TextDelta:
			words = append(words, event.Text)
			if len(words) == 1 && afterFirst != nil {
				afterFirst()
			}
		case *legato.Finished:
			last = event
		}
	}
	return words, last
}
