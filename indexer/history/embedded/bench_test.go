package embedded_test

import (
	"testing"

	"github.com/ClickHouse/clickhouse-go/v2"

	"kvstrata/indexer/history/embedded"
)

func BenchmarkInsert(b *testing.B) {
	r := start(b, config(""))
	w := r.open(b, embedded.Writer)
	exec(b, w, numbersTable)
	const rows = 200_000
	first := 0
	for b.Loop() {
		if err := fill(b.Context(), w, "numbers", first, rows); err != nil {
			b.Fatal(err)
		}
		first += rows
	}
	b.ReportMetric(float64(first)/b.Elapsed().Seconds(), "rows/s")
}

func BenchmarkSmallQuery(b *testing.B) {
	r := start(b, config(""))
	d := r.open(b, embedded.Dashboard)
	for b.Loop() {
		var n uint64
		if err := d.QueryRow(b.Context(), "SELECT {n:UInt64}", clickhouse.Named("n", 7)).Scan(&n); err != nil {
			b.Fatal(err)
		}
	}
}
