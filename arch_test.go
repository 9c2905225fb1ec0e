// Package kvstrata_test holds what is checked of the repository as a whole: which package imports which, which packages
// are pure, and that the documents' examples are what the code does.
package kvstrata_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

const module = "kvstrata"

// layout is the import table: a folder, and the folders of ours that it may import beside its own. A folder below one of
// these inherits its row. Rows of packages that do not exist yet are there so that they begin in their place.
var layout = map[string][]string{
	"event":           {},
	"secret":          {},
	"bus":             {"event", "secret"},
	"curve":           {"secret"},
	"publisher":       {"event", "bus", "curve"},
	"subscriber":      {"event", "bus", "curve"},
	"connector":       {"event"},
	"indexer/prefix":  {"event"},
	"indexer/history": {"event", "migrations"},
	"migrations":      {},
	"web":             {"event"},
	"server":          {"secret"},
	"router":          {"event"},
	"sim":             {"event", "connector"},
	"cmd/kvstrata":    {everything},
	"cmd/libkvstrata": {"event", "connector", "publisher"},
	"chaos":           {everything},
	"interop":         {},
	"porttest":        {}, // beside tests, chaos starts processes on ports
}

const everything = "everything"

// pure are the folders that know no clock, no I/O and no logger: time and input come as arguments.
var pure = []string{"event", "subscriber/recovery", "indexer/history/capacity"}

// impure are the packages that no pure folder imports, those below them included; time is allowed, but for clockCalls.
var impure = []string{"log", "net", "os", "syscall", "math/rand", "github.com/nats-io", "github.com/pebbe"}

var clockCalls = []string{
	"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "Tick", "NewTimer", "NewTicker",
}

func TestImportsPointAtEvent(t *testing.T) {
	for _, problem := range check(t, os.DirFS("."), checkImports) {
		t.Error(problem)
	}
}

func TestPureFoldersStayPure(t *testing.T) {
	for _, problem := range check(t, os.DirFS("."), checkPurity) {
		t.Error(problem)
	}
}

func TestTheImportCheckSeesViolations(t *testing.T) {
	const imports = "package x\n\nimport (\n\t\"fmt\"\n\t\"%s\"\n)\n"
	tests := []struct {
		name, file, imported string
		want                 []string
	}{
		{"allowed", "bus/lease.go", "kvstrata/event", nil},
		{"a sub-package of an allowed one", "bus/lease.go", "kvstrata/event/resident", nil},
		{"its own sub-package", "subscriber/engine.go", "kvstrata/subscriber/recovery", nil},
		{"of others, not ours to judge", "event/event.go", "example.com/kvstrata/bus", nil},
		{"cmd imports all", "cmd/kvstrata/stack.go", "kvstrata/indexer/prefix", nil},
		{
			"two layers above event know each other", "indexer/prefix/lookup.go", "kvstrata/subscriber",
			[]string{"indexer/prefix/lookup.go imports kvstrata/subscriber: of ours, indexer/prefix may import only event"},
		},
		{
			"a sub-package inherits its row", "event/resident/judge.go", "kvstrata/bus",
			[]string{"event/resident/judge.go imports kvstrata/bus: of ours, event may import only itself"},
		},
		{
			"a file of one system only", "event/sum_linux.go", "kvstrata/bus",
			[]string{"event/sum_linux.go imports kvstrata/bus: of ours, event may import only itself"},
		},
		{
			"a folder with a like name", "server/server.go", "kvstrata/eventful",
			[]string{"server/server.go imports kvstrata/eventful: of ours, server may import only secret"},
		},
		{
			"the root", "server/server.go", "kvstrata",
			[]string{"server/server.go imports kvstrata: of ours, server may import only secret"},
		},
		{"a test", "event/event_test.go", "kvstrata/bus", nil},
		{"a contract test", "publisher/publishertest/run.go", "kvstrata/subscriber", nil},
		{"a test at the root", "arch_test.go", "kvstrata/bus", nil},
		{"test data", "event/testdata/x.go", "kvstrata/bus", nil},
		{
			"a folder that nobody placed", "helpers/strings.go", "fmt",
			[]string{"helpers/strings.go: folder helpers is not in the import table of arch_test.go"},
		},
		{
			"only tests in a folder that nobody placed", "e2e/e2e_test.go", "fmt",
			[]string{"e2e/e2e_test.go: folder e2e is not in the import table of arch_test.go"},
		},
		{
			"indexer has no row of its own", "indexer/indexer.go", "fmt",
			[]string{"indexer/indexer.go: folder indexer is not in the import table of arch_test.go"},
		},
		{
			"code at the root", "main.go", "fmt",
			[]string{"main.go: folder . is not in the import table of arch_test.go"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			fsys := fstest.MapFS{tt.file: {Data: fmt.Appendf(nil, imports, tt.imported)}}
			if diff := cmp.Diff(tt.want, check(t, fsys, checkImports)); diff != "" {
				t.Error(diff)
			}
		})
	}
	t.Run("a module of its own", func(t *testing.T) {
		fsys := fstest.MapFS{"bench/go.mod": {}, "bench/x.go": {Data: fmt.Appendf(nil, imports, "kvstrata/bus")}}
		if problems := check(t, fsys, checkImports); problems != nil {
			t.Error(problems)
		}
	})
}

func TestThePurityCheckSeesViolations(t *testing.T) {
	const clock = "package x\n\nimport \"time\"\n\nfunc f() time.Time { return time.Now() }\n"
	tests := []struct {
		name, file, source string
		want               []string
	}{
		{"a clock", "event/event.go", clock, []string{"event/event.go calls time.Now: event is pure"}},
		{"a clock elsewhere", "subscriber/engine.go", clock, nil},
		{"a clock in a test", "event/event_test.go", clock, nil},
		{"a time that is given", "event/event.go", "package x\n\nimport \"time\"\n\ntype t = time.Time\n", nil},
		{
			"a logger", "subscriber/recovery/recovery.go", "package x\n\nimport _ \"log/slog\"\n",
			[]string{"subscriber/recovery/recovery.go imports log/slog: subscriber/recovery is pure"},
		},
		{
			"a file", "event/resident/judge.go", "package x\n\nimport _ \"os\"\n",
			[]string{"event/resident/judge.go imports os: event is pure"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, check(t, fstest.MapFS{tt.file: {Data: []byte(tt.source)}}, checkPurity)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// check parses every Go file of this module, whatever its build tags, and returns what a check finds in them.
func check(t *testing.T, fsys fs.FS, find func(name string, file *ast.File) []string) (problems []string) {
	t.Helper()
	err := fs.WalkDir(fsys, ".", func(name string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir():
			return enter(fsys, name)
		case path.Ext(name) != ".go" || isTestFolder(path.Dir(name)):
			return nil
		}
		source, err := fs.ReadFile(fsys, name)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, source, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		problems = append(problems, find(name, file)...)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return problems
}

// enter says whether a folder belongs to this module, as the go command sees it.
func enter(fsys fs.FS, name string) error {
	if name == "." {
		return nil
	}
	base := path.Base(name)
	if base[0] == '.' || base[0] == '_' || base == "testdata" || base == "node_modules" {
		return fs.SkipDir
	}
	if _, err := fs.Stat(fsys, path.Join(name, "go.mod")); err == nil {
		return fs.SkipDir
	}
	return nil
}

// isTestFolder tells the packages that hold tests for others to run, as publisher/publishertest.
func isTestFolder(folder string) bool { return strings.HasSuffix(folder, "test") }

func checkImports(name string, file *ast.File) (problems []string) {
	folder := path.Dir(name)
	isTest := strings.HasSuffix(name, "_test.go")
	row, ok := rowOf(folder)
	if !ok && !(isTest && folder == ".") {
		return []string{fmt.Sprintf("%s: folder %s is not in the import table of arch_test.go", name, folder)}
	}
	if isTest {
		return nil
	}
	for _, imported := range imports(file) {
		ours, isOurs := strings.CutPrefix(imported, module+"/")
		if !isOurs && imported != module || allowed(row, ours) {
			continue
		}
		may := "itself"
		if len(layout[row]) > 0 {
			may = strings.Join(layout[row], ", ")
		}
		problems = append(problems, fmt.Sprintf("%s imports %s: of ours, %s may import only %s", name, imported, row, may))
	}
	return problems
}

// rowOf returns the row of the table that a folder falls under.
func rowOf(folder string) (row string, ok bool) {
	for row = folder; row != "."; row = path.Dir(row) {
		if _, ok := layout[row]; ok {
			return row, true
		}
	}
	return "", false
}

// allowed reports whether what falls under a row may import a folder of ours.
func allowed(row, folder string) bool {
	target, ok := rowOf(folder)
	return ok && (target == row || slices.Contains(layout[row], target) || slices.Contains(layout[row], everything))
}

func imports(file *ast.File) (paths []string) {
	for _, spec := range file.Imports {
		text, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			panic(err) // the parser took it
		}
		paths = append(paths, text)
	}
	return paths
}

func checkPurity(name string, file *ast.File) (problems []string) {
	within := func(p, root string) bool { return p == root || strings.HasPrefix(p, root+"/") }
	at := slices.IndexFunc(pure, func(root string) bool { return within(path.Dir(name), root) })
	if at < 0 || strings.HasSuffix(name, "_test.go") {
		return nil
	}
	for _, imported := range imports(file) {
		if slices.ContainsFunc(impure, func(root string) bool { return within(imported, root) }) {
			problems = append(problems, fmt.Sprintf("%s imports %s: %s is pure", name, imported, pure[at]))
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		call, ok := n.(*ast.SelectorExpr)
		if !ok || !slices.Contains(clockCalls, call.Sel.Name) {
			return true
		}
		if pkg, ok := call.X.(*ast.Ident); ok && pkg.Name == "time" {
			problems = append(problems, fmt.Sprintf("%s calls time.%s: %s is pure", name, call.Sel.Name, pure[at]))
		}
		return true
	})
	return problems
}
