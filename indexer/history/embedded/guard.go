package embedded

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// forbidden are functions that reach out of the database and that readonly=1 lets pass: file() reads any file, eval()
// runs SQL that is hidden in a string, the others call services. A function's name may stand without parentheses too
// (arrayMap(file, …), APPLY(file)), so the name is refused wherever it is an identifier.
var forbidden = names(
	"file", "eval", "catboostEvaluate", "aiClassify", "aiEmbed", "aiExtract", "aiGenerate", "aiTranslate",
)

// harmless are the table functions that read nothing from outside and take no columns as text: generateRandom('a String
// ALIAS file(…)') runs what its text says, and DESCRIBE TABLE url(…) connects in spite of readonly=1. format is a
// function of strings as well, and as a table function readonly=1 refuses it.
var harmless = names(
	"numbers", "numbers_mt", "zeros", "zeros_mt", "primes", "generateSeries", "generate_series", "view", "merge",
	"mergeTreeIndex", "mergeTreeProjection", "mergeTreeTextIndex", "format",
)

func names(list ...string) map[string]bool {
	set := make(map[string]bool)
	for _, name := range list {
		set[strings.ToLower(name)] = true
	}
	return set
}

// guard says which statements a read pool runs. It judges by the engine's own parser, never by our reading of raw SQL.
type guard struct {
	tables map[string]bool // the names of table functions

	mu       sync.Mutex
	verdicts map[string]verdict // by statement; the named queries come again and again
}

type verdict struct {
	refused    error
	streamable bool // the answer may be had chunk by chunk
}

// What is remembered of statements is bounded in number and in the bytes of each.
const (
	maxVerdicts   = 512
	maxRemembered = 8 << 10
)

// newGuard asks the engine for what it must know.
func newGuard(c *connection) (*guard, error) {
	list, err := c.query("SELECT name FROM system.table_functions", "TabSeparatedRaw", nil)
	if err != nil {
		return nil, fmt.Errorf("ask the history engine its table functions: %w", err)
	}
	return &guard{tables: names(strings.Fields(string(list))...), verdicts: make(map[string]verdict)}, nil
}

// check judges what may run on a read pool's connection, which the caller holds.
func (g *guard) check(c *connection, sql, format string) (streamable bool, err error) {
	key := format + " " + sql
	g.mu.Lock()
	v, known := g.verdicts[key]
	g.mu.Unlock()
	if known {
		return v.streamable, v.refused
	}
	text, err := c.canonical(sql)
	if err != nil { // a syntax error, with its position; or the engine itself failed, as for want of memory
		return false, err
	}
	count, class := c.classify(sql)
	v = verdict{refused: g.judge(count, class, text), streamable: streams(text, format)}
	if class == classUnknown || len(key) > maxRemembered {
		return v.streamable, v.refused
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.verdicts) >= maxVerdicts {
		clear(g.verdicts)
	}
	g.verdicts[key] = v
	return v.streamable, v.refused
}

// judge returns why a statement may not run, given what the engine says of it and its canonical text.
func (g *guard) judge(count int, class statementClass, text string) error {
	switch {
	case class != classReadOnly:
		return refuse(codeReadOnly, "READONLY",
			"only statements that read run here: no INSERT, no CREATE or DROP, no SET or USE, no KILL, no INTO OUTFILE")
	case count != 1:
		return refuse(codeReadOnly, "READONLY", "%d statements in one request: send one", count)
	}
	for _, id := range identifiers(text) {
		switch name := strings.ToLower(id.name); {
		case forbidden[name]:
			return refuse(codeReadOnly, "READONLY", "%s is refused here, as a function or as any other name", id.name)
		case id.called && g.tables[name] && !harmless[name]:
			return refuse(codeReadOnly, "READONLY", "the table function %s is refused here", id.name)
		case id.typed && name == "identifier":
			return refuse(codeReadOnly, "READONLY", "a parameter of the type Identifier is refused here: it could name a function")
		}
	}
	return nil
}

// streamed are the formats without head or foot: the engine writes those of any other once a chunk.
var streamed = map[string]bool{
	"Native": true, "RowBinary": true, "RawBLOB": true, "CSV": true, "TabSeparated": true, "TSV": true,
	"TabSeparatedRaw": true, "TSVRaw": true, "JSONEachRow": true, "JSONCompactEachRow": true,
}

var formatTail = regexp.MustCompile(`(?s)\sFORMAT (\w+)(\s+SETTINGS [^'` + "`" + `]*)?$`)

// streams reports whether an answer may be had in chunks, given a statement's canonical text and the format of a
// statement that names none.
func streams(text, format string) bool {
	if slices.ContainsFunc(identifiers(text), func(id identifier) bool { return id.name == "FORMAT" }) {
		format = ""
		if m := formatTail.FindStringSubmatch(text); m != nil {
			format = m[1]
		}
	}
	return streamed[format]
}

// canonical returns a statement as the engine's parser understood it: without comments, with names unescaped.
func (c *connection) canonical(sql string) (string, error) {
	text, err := c.query("SELECT formatQuery({q:String})", "RawBLOB", []param{{"q", escapeParam(sql)}})
	return string(text), err
}

// escapeParam writes a text as a parameter's value is read.
func escapeParam(s string) string {
	return strings.NewReplacer(`\`, `\\`, "\t", `\t`, "\n", `\n`, "\r", `\r`, "\x00", `\0`).Replace(s)
}

// identifier is a name or a keyword in canonical text.
type identifier struct {
	name   string
	called bool // a parenthesis follows
	typed  bool // a colon precedes, as in {name:Type}
}

// identifiers reads canonical text, which quotes strings by ' and unusual names by `.
func identifiers(text string) (found []identifier) {
	for i := 0; i < len(text); {
		start, end, next := i, i, i+1
		switch b := text[i]; {
		case b == '\'' || b == '`' || b == '"':
			start, end = i+1, i+1
			for end < len(text) && text[end] != b {
				if text[end] == '\\' {
					end++
				}
				end++
			}
			end = min(end, len(text))
			next = end + 1
			if b == '\'' {
				start = end
			}
		case wordByte(b):
			for end < len(text) && wordByte(text[end]) {
				end++
			}
			next = end
		}
		if start < end {
			before, after := strings.TrimRight(text[:i], " \n"), strings.TrimLeft(text[min(next, len(text)):], " \n")
			found = append(found, identifier{text[start:end], strings.HasPrefix(after, "("), strings.HasSuffix(before, ":")})
		}
		i = next
	}
	return found
}

func wordByte(b byte) bool {
	return b == '_' || b >= '0' && b <= '9' || b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= 0x80
}
