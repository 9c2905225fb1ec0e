package kvstrata_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/compose-spec/compose-go/v2/dotenv"
	"github.com/compose-spec/compose-go/v2/loader"
	"github.com/compose-spec/compose-go/v2/types"
	nats "github.com/nats-io/nats-server/v2/server"
)

// The files of a deployment. No engine for containers runs here: what of them can be held against the binary, is.
const (
	composeFile = "docker-compose.yml"
	dockerFile  = "Dockerfile"
	deployDoc   = "docs/deploy.md"
)

var deployments = []string{"deploy/single.env", "deploy/cluster.env"}

func TestDeployment(t *testing.T) {
	b := buildBinary(t)
	text := read(t, composeFile)
	for _, env := range deployments {
		t.Run(path.Base(env), func(t *testing.T) {
			for _, problem := range checkCompose(t, b, text, env) {
				t.Error(problem)
			}
		})
	}
	t.Run("violations", func(t *testing.T) { composeViolations(t, b, text) })
	t.Run("no password", func(t *testing.T) {
		if _, err := loadCompose(t.Context(), text, map[string]string{"COMPOSE_PROFILES": "single"}); err == nil || !strings.Contains(err.Error(), ".env") {
			t.Errorf("%v, want what to do", err)
		}
	})
	t.Run("Dockerfile", func(t *testing.T) {
		for _, problem := range checkDockerfile(t, b, read(t, dockerFile)) {
			t.Error(problem)
		}
	})
	t.Run("Dockerfile violations", func(t *testing.T) { dockerfileViolations(t, b) })
}

// The variables that compose fills in are documented, and those of ours mean something to the binary.
func TestDeploymentVariablesAreDocumented(t *testing.T) {
	doc, used := read(t, deployDoc), make(map[string]bool)
	for _, match := range regexp.MustCompile(`\$\{(\w+)`).FindAllStringSubmatch(read(t, composeFile), -1) {
		used[match[1]] = true
	}
	for _, file := range deployments {
		env, err := dotenv.Read(file)
		if err != nil {
			t.Fatal(err)
		}
		for name := range env {
			if !used[name] && name != "COMPOSE_PROFILES" {
				t.Errorf("%s sets %s, which %s does not use", file, name, composeFile)
			}
			used[name] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(used)) {
		if !strings.Contains(doc, "`"+name+"`") {
			t.Errorf("%s does not name %s", deployDoc, name)
		}
	}
}

// binary is the real one, and what its help says.
type binary struct {
	path      string
	variables map[string]bool // that run reads
	roles     []string
}

func buildBinary(t *testing.T) binary {
	t.Helper()
	b := binary{path: filepath.Join(t.TempDir(), "kvstrata"), variables: make(map[string]bool)}
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", b.path, "./cmd/kvstrata").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	help, code := b.run(t, nil, "run", "--help")
	if code != 0 {
		t.Fatalf("run --help: %d\n%s", code, help)
	}
	for _, match := range regexp.MustCompile(`\$(KVSTRATA_\w+)`).FindAllStringSubmatch(help, -1) {
		b.variables[match[1]] = true
	}
	if match := regexp.MustCompile(`--roles=([a-z,]+)`).FindStringSubmatch(help); match != nil {
		b.roles = strings.FieldsFunc(match[1], func(r rune) bool { return r == ',' })
	}
	if len(b.variables) < 10 || len(b.roles) < 2 {
		t.Fatalf("run --help names the variables %v and the roles %v", b.variables, b.roles)
	}
	return b
}

// run runs the binary with this environment alone, and returns what it says and its exit code.
func (b binary) run(t *testing.T, env map[string]string, args ...string) (string, int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, b.path, args...)
	cmd.Env = []string{"TMPDIR=" + filepath.Dir(b.path)}
	for name, value := range env {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out)), cmd.ProcessState.ExitCode()
}

// accepts says what the binary has against a command and its environment, and starts nothing: a value that is refused
// right after parsing ends it.
func (b binary) accepts(t *testing.T, env map[string]string, args ...string) (problem string) {
	t.Helper()
	env = maps.Clone(env)
	env["KVSTRATA_NATS_REPLICAS"] = "99"
	const end = "kvstrata: --nats-replicas 99: want 1 to 5 (usage)"
	if said, _ := b.run(t, env, args...); said != end {
		return cmp.Or(strings.ReplaceAll(said, "\n", "; "), "it said nothing")
	}
	return ""
}

// loadCompose reads a compose file as docker compose does, with what a .env file and the shell say.
func loadCompose(ctx context.Context, text string, env map[string]string) (*types.Project, error) {
	dir, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	return loader.LoadWithContext(ctx, types.ConfigDetails{
		WorkingDir: dir, Environment: env, ConfigFiles: []types.ConfigFile{{Filename: composeFile, Content: []byte(text)}},
	}, loader.WithProfiles(strings.Split(env["COMPOSE_PROFILES"], ",")))
}

// checkCompose returns all problems of a compose file under one of the .env files.
func checkCompose(t *testing.T, b binary, text, envFile string) []string {
	t.Helper()
	env, err := dotenv.Read(envFile)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"CLICKHOUSE_PASSWORD", "NATS_PASSWORD", "KVSTRATA_TOKEN"} {
		if secret, ok := env[name]; !ok || secret != "" {
			return []string{envFile + ": " + name + " is for the user to set"}
		}
		env[name] = "secretofthetests0123456789"
	}
	project, err := loadCompose(t.Context(), text, env)
	if err != nil {
		return []string{err.Error()}
	}
	c := composeCheck{t: t, binary: b, project: project}
	roles := make(map[string]int)
	for _, name := range project.ServiceNames() {
		s := project.Services[name]
		c.service(s)
		switch image, _, _ := strings.Cut(s.Image, ":"); image {
		case "kvstrata":
			c.role(s, roles)
		case "nats":
			c.nats(s)
		}
	}
	for _, role := range b.roles {
		if roles[role] != 1 {
			c.fail("role %s is in %d services, want 1", role, roles[role])
		}
	}
	c.volumes()
	return c.problems
}

type composeCheck struct {
	t        *testing.T
	binary   binary
	project  *types.Project
	problems []string
}

func (c *composeCheck) fail(format string, args ...any) {
	c.problems = append(c.problems, fmt.Sprintf(format, args...))
}

// service checks what holds for every one.
func (c *composeCheck) service(s types.ServiceConfig) {
	if s.Restart != "unless-stopped" {
		c.fail("%s: restart %q", s.Name, s.Restart)
	}
	if s.Logging == nil || s.Logging.Options["max-size"] == "" || s.Logging.Options["max-file"] == "" {
		c.fail("%s: its log is not bounded", s.Name)
	}
	if !slices.Contains(s.SecurityOpt, "no-new-privileges:true") {
		c.fail("%s: may get new privileges", s.Name)
	}
	if !strings.Contains(s.Image, ":") || strings.HasSuffix(s.Image, ":latest") {
		c.fail("%s: image %s names no version", s.Name, s.Image)
	}
	for _, port := range s.Ports {
		if ip, err := netip.ParseAddr(port.HostIP); err != nil || !ip.IsLoopback() {
			c.fail("%s: port %d is published on %q, not on loopback", s.Name, port.Target, port.HostIP)
		}
	}
	for name, dependency := range s.DependsOn {
		target, ok := c.project.AllServices()[name]
		if !ok {
			c.fail("%s: depends on %s, which is not there", s.Name, name)
			continue
		}
		if dependency.Condition != types.ServiceConditionHealthy {
			c.fail("%s: depends on %s: %s", s.Name, name, dependency.Condition)
		}
		if h := target.HealthCheck; h == nil || h.Disable || len(h.Test) < 2 {
			c.fail("%s: depends on %s, which has no health check", s.Name, name)
		}
		if dependency.Required && len(target.Profiles) > 0 {
			c.fail("%s: needs %s, which only some profiles have", s.Name, name)
		}
	}
}

// role checks a service that runs our image.
func (c *composeCheck) role(s types.ServiceConfig, roles map[string]int) {
	env := map[string]string{"KVSTRATA_DATA": "/data"}
	for name, value := range s.Environment {
		if !c.binary.variables[name] {
			c.fail("%s: %s means nothing to the binary", s.Name, name)
		}
		if value != nil {
			env[name] = *value
		}
	}
	if at, ok := env["KVSTRATA_ENGINES"]; ok {
		mount := slices.IndexFunc(s.Volumes, func(v types.ServiceVolumeConfig) bool { return v.Target == at })
		if mount < 0 {
			c.fail("%s: nothing is mounted at %s", s.Name, at)
			return
		}
		env["KVSTRATA_ENGINES"] = s.Volumes[mount].Source
	}
	if problem := c.binary.accepts(c.t, env, s.Command...); problem != "" {
		c.fail("%s: the binary refuses %q: %s", s.Name, s.Command, problem)
	}
	if at := slices.Index(s.Command, "--roles"); at >= 0 && at+1 < len(s.Command) {
		for role := range strings.SplitSeq(s.Command[at+1], ",") {
			roles[role]++
		}
	}
	c.healthcheck(s, env)
	if !s.ReadOnly || !slices.Contains(s.CapDrop, "ALL") {
		c.fail("%s: its file system may be written, or it has capabilities", s.Name)
	}
	if len(s.Ports) > 0 && !strings.HasPrefix(env["KVSTRATA_LISTEN"], "0.0.0.0:") {
		c.fail("%s: publishes a port on which nothing listens outside the container", s.Name)
	}
	c.addresses(s, env)
}

// healthcheck runs the health check, which must be refused by no parser and find nobody.
func (c *composeCheck) healthcheck(s types.ServiceConfig, env map[string]string) {
	if s.HealthCheck == nil || len(s.HealthCheck.Test) < 3 || s.HealthCheck.Test[0] != "CMD" || s.HealthCheck.Test[1] != "kvstrata" {
		c.fail("%s: has no health check by the binary", s.Name)
		return
	}
	env = maps.Clone(env)
	env["KVSTRATA_ADMIN"] = "127.0.0.1:1"
	if said, code := c.binary.run(c.t, env, s.HealthCheck.Test[2:]...); code != 1 || !strings.Contains(said, "refused") {
		c.fail("%s: health check %q: exits with %d: %s", s.Name, s.HealthCheck.Test, code, said)
	}
}

// addresses checks that what a role is told to use is a service that runs.
func (c *composeCheck) addresses(s types.ServiceConfig, env map[string]string) {
	servers := strings.Split(env["KVSTRATA_NATS"], ",")
	for _, address := range servers {
		c.address(s, "KVSTRATA_NATS", address, "4222")
	}
	if env["KVSTRATA_NATS_REPLICAS"] != strconv.Itoa(len(servers)) {
		c.fail("%s: %s replicas on %d servers", s.Name, env["KVSTRATA_NATS_REPLICAS"], len(servers))
	}
	if address, ok := env["KVSTRATA_CLICKHOUSE"]; ok {
		c.address(s, "KVSTRATA_CLICKHOUSE", address, "8123")
	}
}

func (c *composeCheck) address(s types.ServiceConfig, variable, address, port string) {
	u, err := url.Parse(address)
	if err != nil || u.Port() != port {
		c.fail("%s: %s %q: want a URL with port %s", s.Name, variable, address, port)
		return
	}
	if _, ok := c.project.Services[u.Hostname()]; !ok {
		c.fail("%s: %s names %s, which does not run", s.Name, variable, u.Hostname())
	} else if s.DependsOn[u.Hostname()].Condition == "" {
		c.fail("%s: uses %s, but does not wait for it", s.Name, u.Hostname())
	}
}

// nats checks a NATS server with NATS's own parser.
func (c *composeCheck) nats(s types.ServiceConfig) {
	flags := flag.NewFlagSet("nats-server", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	opts, err := nats.ConfigureOptions(flags, s.Command, func() {}, func() {}, func() {})
	if err != nil {
		c.fail("%s: nats-server refuses %q: %v", s.Name, s.Command, err)
		return
	}
	if !opts.JetStream || opts.ServerName != s.Name || opts.HTTPPort == 0 {
		c.fail("%s: JetStream %v, name %q, monitoring port %d", s.Name, opts.JetStream, opts.ServerName, opts.HTTPPort)
	}
	if opts.Username == "" || opts.Password == "" || opts.Cluster.Port != 0 && (opts.Cluster.Username == "" || opts.Cluster.Password == "") {
		c.fail("%s: lets everybody in", s.Name)
	}
	if h := s.HealthCheck; h == nil || !strings.Contains(strings.Join(h.Test, " "), fmt.Sprintf("127.0.0.1:%d/healthz", opts.HTTPPort)) {
		c.fail("%s: its health check does not ask port %d", s.Name, opts.HTTPPort)
	}
	if !slices.ContainsFunc(s.Volumes, func(v types.ServiceVolumeConfig) bool {
		return v.Target == opts.StoreDir && v.Type == types.VolumeTypeVolume
	}) {
		c.fail("%s: %s is no volume", s.Name, opts.StoreDir)
	}
	for _, route := range opts.Routes {
		if _, ok := c.project.Services[route.Hostname()]; !ok || route.Port() != strconv.Itoa(opts.Cluster.Port) {
			c.fail("%s: route %s leads nowhere", s.Name, route)
		}
	}
}

// volumes checks that each is used by one service, and that files which are mounted are there.
func (c *composeCheck) volumes() {
	users := make(map[string]int)
	for _, s := range c.project.AllServices() {
		for _, v := range s.Volumes {
			switch v.Type {
			case types.VolumeTypeVolume:
				users[v.Source]++
			case types.VolumeTypeBind:
				if _, err := os.Stat(v.Source); err != nil {
					c.fail("%s: mounts %v", s.Name, err)
				}
			}
		}
	}
	for _, name := range c.project.VolumeNames() {
		if users[name] != 1 {
			c.fail("volume %s has %d users, want 1", name, users[name])
		}
	}
}

// composeViolations checks the checker: each change must be told.
func composeViolations(t *testing.T, b binary, text string) {
	for _, tt := range []struct{ name, old, changed, want string }{
		{"flag", "[run, --roles, web]", "[run, --rolls, web]", "unknown flag --rolls"},
		{"role", "[run, --roles, web]", "[run, --roles, webb]", `--roles "webb"`},
		{"role twice", "[run, --roles, web]", "[run, --roles, prefix]", "role prefix is in 2 services"},
		{"role left out", "[run, --roles, web]", "[run, --roles, prefix]", "role web is in 0 services"},
		{"variable", "KVSTRATA_LISTEN: 0.0.0.0", "KVSTRATA_LISTENS: 0.0.0.0", "KVSTRATA_LISTENS means nothing"},
		{"value of a variable", "${KVSTRATA_LEASE_TTL:-5s}", "five", "five"},
		{"value out of range", "${KVSTRATA_LEASE_TTL:-5s}", "5ms", "--lease-ttl 5ms"},
		{"health check", "[CMD, kvstrata, healthcheck]", "[CMD, kvstrata, healthchek]", "exits with 2"},
		{"port", "${BIND:-127.0.0.1}:8080:8080", "8080:8080", "not on loopback"},
		{"port on all", "${BIND:-127.0.0.1}:8080:8080", "0.0.0.0:8080:8080", "not on loopback"},
		{"volume without a user", "volumes:\n  nats:\n", "volumes:\n  spare:\n  nats:\n", "volume spare has 0 users"},
		{"volume that is not declared", "  nats-3:\n  clickhouse:\n", "  nats-3:\n", "undefined volume clickhouse"},
		{"mounted file", "source: ./deploy/clickhouse.xml", "source: ./deploy/clickhouses.xml", "clickhouses.xml"},
		{"engines elsewhere", "KVSTRATA_ENGINES: /etc", "KVSTRATA_ENGINES: /opt", "nothing is mounted at /opt"},
		{"dependency without health check", `test: [CMD, wget, -q, -O, /dev/null, "http://127.0.0.1:8123/ping"]`, "disable: true", "no health check"},
		{"NATS elsewhere", "${KVSTRATA_NATS:-nats://nats:4222}", "nats://bus:4222", "names bus"},
		{"more replicas than servers", "${KVSTRATA_NATS_REPLICAS:-1}", `"5"`, "5 replicas"},
		{"ClickHouse elsewhere", "@clickhouse:8123", "@db:8123", "names db"},
		{"flag of NATS", "[--name, nats, --jetstream", "[--name, nats, --jetstreams", "nats-server refuses"},
		{"NATS without JetStream", "[--name, nats, --jetstream,", "[--name, nats,", "JetStream false"},
		{"NATS without a volume", `volumes: ["nats:/data"]`, `volumes: ["nats:/store"]`, "/data is no volume"},
		{"NATS without a user", `"8222", --user, kvstrata, --pass, "${NATS_PASSWORD}"]`, `"8222"]`, "nats: lets everybody in"},
		{"API without a token", "  KVSTRATA_TOKEN: ${KVSTRATA_TOKEN:?", "  KVSTRATA_TOKEN: ${KVSTRATA_NO_TOKEN:+", "other machines reach it"},
		{"log", "*logging", "{ driver: json-file }", "its log is not bounded"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			doctored := strings.Replace(text, tt.old, tt.changed, 1)
			if doctored == text {
				t.Fatalf("%q is not in %s", tt.old, composeFile)
			}
			if problems := strings.Join(checkCompose(t, b, doctored, deployments[0]), "\n"); !strings.Contains(problems, tt.want) {
				t.Errorf("told:\n%s\nwant %q", problems, tt.want)
			}
		})
	}
}

// instruction is one of a Dockerfile, with continuations joined.
type instruction struct{ word, rest string }

func parseDockerfile(text string) (all []instruction) {
	var joined bytes.Buffer
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		before, more := strings.CutSuffix(line, `\`)
		joined.WriteString(before)
		if more {
			continue
		}
		word, rest, _ := strings.Cut(joined.String(), " ")
		all = append(all, instruction{word, strings.TrimSpace(rest)})
		joined.Reset()
	}
	return all
}

// checkDockerfile returns what is wrong with a Dockerfile, held against the tree, go.mod and the binary.
func checkDockerfile(t *testing.T, b binary, text string) (problems []string) {
	fail := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	goLine := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindStringSubmatch(read(t, "go.mod"))[1]
	from := regexp.MustCompile(`^(\S+) AS (\S+)$`)
	ignored := readDockerignore(t)
	stages := make(map[string]bool)
	last := make(map[string]string) // of the last stage
	for _, in := range parseDockerfile(text) {
		switch in.word {
		case "FROM":
			match := from.FindStringSubmatch(in.rest)
			if match == nil {
				fail("FROM %s: the stage has no name", in.rest)
				continue
			}
			if version, ok := strings.CutPrefix(match[1], "golang:"); ok && !strings.HasPrefix(version, goLine+"-") {
				fail("FROM %s: go.mod says %s", in.rest, goLine)
			}
			stages[match[2]] = true
			clear(last)
		case "COPY":
			words := strings.Fields(in.rest)
			if stage, ok := strings.CutPrefix(words[0], "--from="); ok {
				if !stages[stage] {
					fail("COPY %s: there is no stage %s", in.rest, stage)
				}
				continue
			}
			for _, source := range words[:len(words)-1] {
				if _, err := os.Stat(source); err != nil {
					fail("COPY %s: %v", in.rest, err)
				}
				if ignored(source) {
					fail("COPY %s: .dockerignore leaves %s out", in.rest, source)
				}
			}
		case "ENV":
			for _, match := range regexp.MustCompile(`(KVSTRATA_\w+)=`).FindAllStringSubmatch(in.rest, -1) {
				if !b.variables[match[1]] {
					fail("ENV %s: means nothing to the binary", in.rest)
				}
			}
		}
		last[in.word] = in.rest
	}
	if want := `["kvstrata"]`; last["ENTRYPOINT"] != want {
		fail("ENTRYPOINT %s, want %s", last["ENTRYPOINT"], want)
	}
	if user, _, _ := strings.Cut(last["USER"], ":"); user == "" || user == "root" || user == "0" {
		fail("USER %q", last["USER"])
	}
	_, command, _ := strings.Cut(last["HEALTHCHECK"], "CMD ")
	args := strings.FieldsFunc(command, func(r rune) bool { return strings.ContainsRune(`[]", `, r) })
	if len(args) < 2 || args[0] != "kvstrata" {
		fail("HEALTHCHECK %s: not by the binary", last["HEALTHCHECK"])
	} else if said, code := b.run(t, map[string]string{"KVSTRATA_ADMIN": "127.0.0.1:1"}, args[1:]...); code != 1 {
		fail("HEALTHCHECK %s: exits with %d: %s", last["HEALTHCHECK"], code, said)
	}
	return problems
}

// readDockerignore returns whether .dockerignore leaves a path out, for the forms of patterns that are in it.
func readDockerignore(t *testing.T) func(name string) bool {
	var patterns []string
	for line := range strings.Lines(read(t, ".dockerignore")) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			patterns = append(patterns, line)
		}
	}
	return func(name string) bool {
		for ; name != "." && name != "/"; name = path.Dir(name) {
			for _, pattern := range patterns {
				target := name
				if rest, ok := strings.CutPrefix(pattern, "**/"); ok {
					pattern, target = rest, path.Base(name)
				}
				if ok, err := path.Match(pattern, target); ok || err != nil {
					return true
				}
			}
		}
		return false
	}
}

func dockerfileViolations(t *testing.T, b binary) {
	text := read(t, dockerFile)
	for _, tt := range []struct{ name, old, changed, want string }{
		{"stage without a name", "AS build", "", "has no name"},
		{"old Go", "golang:1.", "golang:1.1", "go.mod says"},
		{"source", "COPY go.mod", "COPY go.mods", "go.mods"},
		{"source that is left out", "COPY web/ui ./", "COPY docs ./", "leaves docs out"},
		{"stage", "--from=ui", "--from=uis", "no stage uis"},
		{"variable", "KVSTRATA_DATA", "KVSTRATA_DATE", "means nothing"},
		{"entrypoint", `ENTRYPOINT ["kvstrata"]`, `ENTRYPOINT ["sh"]`, `ENTRYPOINT ["sh"]`},
		{"user", "USER 10001:10001", "USER root", "USER"},
		{"health check", "--alive", "--alife", "exits with 2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			doctored := strings.Replace(text, tt.old, tt.changed, 1)
			if doctored == text {
				t.Fatalf("%q is not in %s", tt.old, dockerFile)
			}
			if problems := strings.Join(checkDockerfile(t, b, doctored), "\n"); !strings.Contains(problems, tt.want) {
				t.Errorf("told:\n%s\nwant %q", problems, tt.want)
			}
		})
	}
	got := parseDockerfile("FROM a AS b\n# no\nRUN x \\\n # no\n && y\n")
	if want := []instruction{{"FROM", "a AS b"}, {"RUN", "x && y"}}; !slices.Equal(got, want) {
		t.Errorf("parsed %q, want %q", got, want)
	}
}
