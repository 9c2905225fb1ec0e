// Command kvstrata is the whole of kvstrata in one binary: demo, roles, and tools. One file a subcommand; this one
// wires flags, logs, signals and exit codes.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"
)

// Exit codes, as README.md documents them.
const (
	exitOK       = 0
	exitFailure  = 1 // something did not work; stderr says what
	exitUsage    = 2 // flags or arguments are wrong
	exitMismatch = 3 // a comparison that the command was asked for found a difference
)

// errMismatch is wrapped by what a comparison found.
var errMismatch = errors.New("mismatch")

// errUsage is wrapped by problems with flags that parsing could not see.
var errUsage = errors.New("usage")

type cli struct {
	LogLevel slog.Level `help:"debug, info, warn or error." default:"info" env:"KVSTRATA_LOG_LEVEL"`
	LogJSON  bool       `name:"log-json" help:"Log JSON lines." env:"KVSTRATA_LOG_JSON"`

	Demo     demoCmd     `cmd:"" help:"Run everything here, with simulated engines."`
	Run      runCmd      `cmd:"" help:"Run roles against real engines."`
	Tail     tailCmd     `cmd:"" help:"Print events as they come."`
	Query    queryCmd    `cmd:"" help:"Ask history a named question."`
	SQL      sqlCmd      `cmd:"" name:"sql" help:"Ask history in SQL, reading only."`
	Explain  explainCmd  `cmd:"" help:"Tell the story of one block."`
	Capacity capacityCmd `cmd:"" help:"Say what caches of other sizes would hit of a trace."`
	Export   exportCmd   `cmd:"" help:"Write a window of history: as a trace for Perfetto, as JSON lines, or as Parquet."`
	Import   importCmd   `cmd:"" help:"Put a file into a history of its own: an export, a recording of Dynamo's, or raw frames."`
	Capture  captureCmd  `cmd:"" help:"Write down what an engine sends, frame by frame."`
	Devices  devicesCmd  `cmd:"" help:"Sample this machine's GPUs for history."`
	Migrate  migrateCmd  `cmd:"" help:"Bring a ClickHouse to the present schema."`
	Gather   gatherCmd   `cmd:"" help:"Answer lookups from indexes that each keep a part."`
	Lookup   lookupCmd   `cmd:"" help:"Ask an index who holds the longest prefix."`
	Changes  changesCmd  `cmd:"" help:"Print what an index holds, and then what changes, as JSON lines."`
	Doctor   doctorCmd   `cmd:"" help:"Check what kvstrata needs, a line each."`
	Bench    benchCmd    `cmd:"" help:"Measure."`
	Version  versionCmd  `cmd:"" help:"Print versions."`

	CurveKeys   curveKeysCmd   `cmd:"" help:"Make keys for ZeroMQ sockets whose both ends are ours."`
	Healthcheck healthcheckCmd `cmd:"" help:"Ask whether the roles of a process here are ready."`

	Engine        engineCmd        `cmd:"" hidden:"" help:"A simulated engine as a process of its own."`
	HistoryEngine historyEngineCmd `cmd:"" name:"history-engine" hidden:"" help:"The embedded engine's child process."`
}

// app is what every command gets.
type app struct {
	ctx     context.Context
	log     *slog.Logger
	level   slog.Level // of log
	logJSON bool
	stdout  io.Writer
	stderr  io.Writer
}

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// run parses and runs one command line, and returns the exit code.
func run(args []string, stdout, stderr io.Writer) int {
	var c cli
	exit := -1
	parser, err := kong.New(&c, kong.Name("kvstrata"), kong.UsageOnError(), kong.Writers(stdout, stderr),
		kong.Description("See, sync and query the KV cache of a fleet of LLM engines."),
		kong.Exit(func(code int) { exit = code }))
	if err != nil {
		fmt.Fprintln(stderr, "kvstrata:", err)
		return exitFailure
	}
	command, err := parser.Parse(args)
	if exit >= 0 { // --help has printed
		return exit
	}
	if err != nil {
		fmt.Fprintf(stderr, "kvstrata: %v\nRun kvstrata --help, or kvstrata COMMAND --help.\n", err)
		return exitUsage
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// A second signal ends the process at once.
	context.AfterFunc(ctx, stop)
	a := &app{ctx: ctx, log: newLogger(stderr, c.LogLevel, c.LogJSON), level: c.LogLevel, logJSON: c.LogJSON, stdout: stdout, stderr: stderr}
	if err = command.Run(a); err != nil {
		fmt.Fprintln(stderr, "kvstrata:", err)
	}
	return exitCode(err)
}

func exitCode(err error) int {
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errUsage):
		return exitUsage
	case errors.Is(err, errMismatch):
		return exitMismatch
	default:
		return exitFailure
	}
}

func newLogger(w io.Writer, level slog.Level, json bool) *slog.Logger {
	opts := &slog.HandlerOptions{Level: level}
	if json {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

func usagef(format string, args ...any) error {
	return fmt.Errorf(format+" (%w)", append(args, errUsage)...)
}
