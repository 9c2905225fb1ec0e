package main

import (
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/VictoriaMetrics/metricsql"
	"go.yaml.in/yaml/v4"

	"kvstrata/event"
	"kvstrata/subscriber"
)

type alertRules struct {
	Groups []struct {
		Name  string
		Rules []struct {
			Alert, Expr, For    string
			Labels, Annotations map[string]string
		}
	}
}

// readAlerts returns the alert rules; each must tell people something.
func readAlerts(t *testing.T) alertRules {
	t.Helper()
	text, err := os.ReadFile("../../deploy/alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	var rules alertRules
	if err := yaml.Unmarshal(text, &rules); err != nil {
		t.Fatal(err)
	}
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			if r.Annotations["summary"] == "" || r.Labels["severity"] == "" {
				t.Errorf("%s tells nobody anything", r.Alert)
			}
		}
	}
	return rules
}

// scraped are the metrics of a process: their names, the labels of each, and the values of these.
type scraped map[string]map[string]map[string]bool

var (
	sampleLine  = regexp.MustCompile(`(?m)^(\w+)(?:\{(.*)\})? \S+$`)
	sampleLabel = regexp.MustCompile(`(\w+)="((?:[^"\\]|\\.)*)"`)
)

func parseMetrics(text string) scraped {
	all := make(scraped)
	for _, sample := range sampleLine.FindAllStringSubmatch(text, -1) {
		labels := all[sample[1]]
		if labels == nil {
			labels = make(map[string]map[string]bool)
			all[sample[1]] = labels
		}
		for _, label := range sampleLabel.FindAllStringSubmatch(sample[2], -1) {
			if labels[label[1]] == nil {
				labels[label[1]] = make(map[string]bool)
			}
			labels[label[1]][label[2]] = true
		}
	}
	return all
}

// has reports whether a label can have a value. Of some only those show that something is going on for.
func (s scraped) has(metric, label, value string) bool {
	text := []byte(value)
	switch label {
	case "state":
		return new(event.State).UnmarshalText(text) == nil
	case "way":
		return new(event.Way).UnmarshalText(text) == nil
	case "origin":
		return new(event.Origin).UnmarshalText(text) == nil
	case "violation":
		return slices.Contains(subscriber.ViolationNames(), value)
	default:
		return s[metric][label][value]
	}
}

// ofTheScrape are labels that Prometheus gives to every metric.
var ofTheScrape = []string{"job"}

// problems returns what an expression, and the templates that tell of it, ask for and the metrics don't have; and the metrics that
// it asks for.
func (s scraped) problems(expr string, templates map[string]string) (problems, metrics []string) {
	say := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	parsed, err := metricsql.Parse(expr)
	if err != nil {
		return []string{err.Error()}, nil
	}
	metricsql.VisitAll(parsed, func(e metricsql.Expr) {
		m, ok := e.(*metricsql.MetricExpr)
		if !ok {
			return
		}
		for _, filters := range m.LabelFilterss {
			metric := ""
			for _, f := range filters {
				if f.Label == "__name__" {
					metric = f.Value
					metrics = append(metrics, metric)
				}
			}
			if s[metric] == nil {
				say("no metric %q", metric)
				continue
			}
			for _, f := range filters {
				values := []string{f.Value}
				if f.IsRegexp {
					values = strings.Split(f.Value, "|")
				}
				switch {
				case f.Label == "__name__":
				case s[metric][f.Label] == nil:
					say("%s has no label %s", metric, f.Label)
				default:
					for _, v := range values {
						if !s.has(metric, f.Label, v) {
							say("%s is never %q in %s", f.Label, v, metric)
						}
					}
				}
			}
		}
	})
	// Labels that the result has: those kept by an aggregation, or the metrics' own.
	kept := slices.Clone(ofTheScrape)
	grouped := false
	metricsql.VisitAll(parsed, func(e metricsql.Expr) {
		if a, ok := e.(*metricsql.AggrFuncExpr); ok {
			grouped = true
			kept = append(kept, a.Modifier.Args...)
		}
	})
	for _, metric := range metrics {
		for _, label := range kept {
			if !slices.Contains(ofTheScrape, label) && s[metric] != nil && s[metric][label] == nil {
				say("%s has no label %s to group by", metric, label)
			}
		}
		if !grouped {
			kept = slices.AppendSeq(kept, maps.Keys(s[metric]))
		}
	}
	for _, text := range templates {
		for _, used := range regexp.MustCompile(`\$labels\.(\w+)`).FindAllStringSubmatch(text, -1) {
			if !slices.Contains(kept, used[1]) {
				say("the text names the label %s, which the result does not have", used[1])
			}
		}
	}
	return problems, metrics
}

// alertsFindTheirMetrics checks that a process with every role has each metric, label and value that an alert asks for.
func alertsFindTheirMetrics(t *testing.T, admin string) {
	t.Helper()
	has := parseMetrics(string(fetch(t, admin+"/metrics")))
	var all []string
	for _, g := range readAlerts(t).Groups {
		for _, r := range g.Rules {
			problems, metrics := has.problems(r.Expr, r.Annotations)
			for _, p := range problems {
				t.Errorf("deploy/alerts.yml, %s: %s", r.Alert, p)
			}
			all = append(all, metrics...)
		}
	}
	if slices.Sort(all); len(slices.Compact(all)) < 10 {
		t.Errorf("the alerts ask for %d metrics only", len(all))
	}
}

// What the check of the alerts must see.
func TestTheAlertsCheckSeesSlips(t *testing.T) {
	has := parseMetrics("# TYPE a_total counter\na_total{instance=\"i\",reason=\"x,y=\\\"{\",state=\"live\"} 3\nb 1e-3\n")
	for expr, want := range map[string]string{
		`sum by (instance) (increase(a_total{state="partial"}[1m])) > 0`: "",
		`a_total{state=~"live|gone"} == 1`:                               "",
		`a_total{stat="partial"}`:                                        "no label stat",
		`a_total{state="partly"}`:                                        `state is never "partly"`,
		`a_total{state=~"live|partly"}`:                                  `state is never "partly"`,
		`a_total{reason="z"}`:                                            `reason is never "z"`,
		`c_total`:                                                        `no metric "c_total"`,
		`sum by (instanz) (a_total)`:                                     "no label instanz to group by",
		`sum by (reason) (a_total)`:                                      "the text names the label instance",
		`b`:                                                              "the text names the label instance",
		`a_total{`:                                                       "unexpected",
	} {
		problems, _ := has.problems(expr, map[string]string{"summary": "{{ $labels.instance }} at {{ $labels.job }}"})
		if said := strings.Join(problems, "; "); (said == "") != (want == "") || !strings.Contains(said, want) {
			t.Errorf("%s: %q, want %q", expr, said, want)
		}
	}
}
