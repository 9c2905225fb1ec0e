package main

import (
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/VictoriaMetrics/metricsql"
	"go.yaml.in/yaml/v4"
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

// metricsOfAlerts returns the metrics that the alert rules ask for; each rule must parse, and tell people something.
func metricsOfAlerts(t *testing.T) map[string]bool {
	t.Helper()
	text, err := os.ReadFile("../../deploy/alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	var rules alertRules
	if err := yaml.Unmarshal(text, &rules); err != nil {
		t.Fatal(err)
	}
	names := make(map[string]bool)
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			expr, err := metricsql.Parse(r.Expr)
			if err != nil {
				t.Errorf("%s: %v", r.Alert, err)
				continue
			}
			if r.Annotations["summary"] == "" || r.Labels["severity"] == "" {
				t.Errorf("%s tells nobody anything", r.Alert)
			}
			metricsql.VisitAll(expr, func(e metricsql.Expr) {
				m, ok := e.(*metricsql.MetricExpr)
				if !ok {
					return
				}
				for _, filters := range m.LabelFilterss {
					for _, f := range filters {
						if f.Label == "__name__" {
							names[f.Value] = true
						}
					}
				}
			})
		}
	}
	return names
}

// alertsFindTheirMetrics checks that a process with every role has each metric that an alert asks for.
func alertsFindTheirMetrics(t *testing.T, admin string) {
	t.Helper()
	resp, err := http.Get(admin + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	names := metricsOfAlerts(t)
	if len(names) < 10 {
		t.Errorf("the alerts ask for %d metrics only", len(names))
	}
	for name := range names {
		if !strings.Contains(string(body), "# TYPE "+name+" ") {
			t.Errorf("deploy/alerts.yml asks for %s, which /metrics does not have", name)
		}
	}
}
