package history

import (
	"fmt"
	"time"

	"kvstrata/event"
)

var tiers = []Query{
	{
		Name: "tiers", Title: "Tiers",
		Help:   "What each engine stored into each tier and loaded from it again, and which offload does not pay.",
		Params: []Param{since, until, model, engine, limit},
		sql: `WITH tellers AS (
  SELECT DISTINCT ` + modelOf + ` AS model, ` + instanceOf + ` AS instance, 1 AS tells FROM (
    SELECT source FROM progress WHERE endsWith(source, '.connector') UNION ALL SELECT source FROM loads WHERE ` + inWindow + `)),
sums AS (
  SELECT model, instance, tier, sum(stored) AS n_stored, sum(saved_bytes) AS n_saved_bytes, sum(loaded) AS n_loaded, sum(loaded_bytes) AS n_loaded_bytes,
    min(least) AS smallest, max(most) AS largest
  FROM (
    SELECT ` + modelOf + ` AS model, ` + instanceOf + ` AS instance, tier, stored, saved_bytes, loaded, loaded_bytes, least, most FROM (
      SELECT source, toString(tier) AS tier, sum(n_stored) AS stored, 0 AS saved_bytes, 0 AS loaded, 0 AS loaded_bytes, 4294967295 AS least, 0 AS most FROM (
        ` + counted(`source, tier, stored AS n_stored`) + `
        UNION ALL SELECT source, tier, countIf(op = 'STORED' AND effect > 0) FROM block_events WHERE ` + inTail + ` GROUP BY source, tier)
      WHERE NOT endsWith(source, '.store') AND NOT endsWith(source, '.connector') GROUP BY source, tier
      UNION ALL SELECT source, toString(tier) AS tier, countIf(op = 'STORED'), 0, 0, 0, 4294967295, 0 FROM block_events
      WHERE source IN (SELECT source FROM progress WHERE endsWith(source, '.connector')) AND ` + inSeconds + ` GROUP BY source, tier
      UNION ALL SELECT source, '' AS tier, 0, 0, 0, 0, min(block_size), max(block_size) FROM block_events
      WHERE block_size > 0 AND NOT endsWith(source, '.store') AND ` + inSample + ` AND ` + inSeconds + ` GROUP BY source
      UNION ALL SELECT source, toString(to_tier) AS tier, 0, sum(bytes), 0, 0, 4294967295, 0 FROM transfers WHERE kind = 'saved' AND ` + inWindow + ` GROUP BY source, tier
      UNION ALL SELECT source, toString(from_tier) AS tier, 0, 0, sum(blocks), sum(bytes), 4294967295, 0 FROM loads WHERE ` + inWindow + ` GROUP BY source, tier))
  GROUP BY model, instance, tier)
SELECT model, instance, tier, n_stored, if(size = 0, NULL, n_stored * size), nullIf(n_saved_bytes, 0), if(tells = 0, NULL, n_loaded),
  if(tells = 0 OR size = 0, NULL, n_loaded * size), if(tells = 0, NULL, n_loaded_bytes), if(tells = 0, nan, n_loaded / n_stored),
  if(tells = 0, NULL, all_loaded) AS of, if(tells = 0, nan, n_loaded / of)
FROM (
  SELECT *, sum(n_loaded) OVER (PARTITION BY model, instance) AS all_loaded, max(largest) OVER (PARTITION BY model, instance) AS greatest_size,
    if(min(smallest) OVER (PARTITION BY model, instance) = greatest_size, greatest_size, 0) AS size
  FROM sums) AS sized
LEFT JOIN tellers USING (model, instance)
WHERE n_stored > 0 OR n_saved_bytes > 0 OR n_loaded > 0
ORDER BY model, instance, n_loaded DESC, n_stored DESC, tier
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"model", "text", ""},
			{"engine", "text", ""},
			{"tier", "text", ""},
			{"stored", "number", "blocks"},
			{"stored tokens", "number", "tokens"},
			{"stored bytes", "bytes", "B"},
			{"loaded", "number", "blocks"},
			{"loaded tokens", "number", "tokens"},
			{"loaded bytes", "bytes", "B"},
			{"loaded of stored", "ratio", ""},
			{"of loaded", "number", "blocks"},
			{"share of loads", "ratio", ""},
		},
		chart: Chart{"bar", "engine", []string{"stored", "loaded"}},
		notes: []string{
			"loaded is what left the tier for a warmer one, as connectors tell; null where an engine has no connector that tells loads; " + noHits + ", so that what was served from the device's own memory is not known",
			"loaded of stored may pass 1: a block can be loaded more than once, and may have been stored before the window",
			"stored bytes are those of transfer records, and null where none tells them; tokens are blocks times the engine's block size, and null where it has several; that is looked up in a share of the blocks where they are many",
			"what shared stores tell themselves is left out: the engines' connectors tell what they stored there",
		},
		remarks:  offloadRemarks,
		counting: wholeWindow,
		peeks:    true,
	},
}

// payingShare is how much of what was stored must be loaded again for an offload to count as paying.
const payingShare = 0.1

// offloadRemarks says in sentences which offload does not pay.
func offloadRemarks(a *Answer) (said []string) {
	length := time.Duration(a.Until-a.Since) * time.Millisecond
	for _, row := range a.Rows {
		engine, tier, stored := row[1], row[2].(string), row[3].(uint64)
		if stored == 0 || event.Tier(tier).Warmth() == 0 {
			continue
		}
		loaded, told := row[6].(uint64)
		switch {
		case !told:
			said = append(said, fmt.Sprintf("%s stored %s to %s in %s; whether that pays can't be told: no connector of it tells loads",
				engine, amount(stored, row[4], row[5]), tier, windowLength(length)))
		case float64(loaded) < payingShare*float64(stored):
			said = append(said, fmt.Sprintf("offload to %s does not pay on %s: stored %s, loaded %s in %s (%.1f %% of the blocks)",
				tier, engine, amount(stored, row[4], row[5]), amount(loaded, row[7], row[8]), windowLength(length), 100*float64(loaded)/float64(stored)))
		}
	}
	return said
}

// amount writes a number of blocks with what is known of their bytes and tokens.
func amount(blocks uint64, tokens, bytes any) string {
	text := plural(int(blocks), "block")
	if n, ok := tokens.(uint64); ok {
		text += ", " + plural(int(n), "token")
	}
	if n, ok := bytes.(uint64); ok {
		return fmt.Sprintf("%s (%s)", byteSize(n), text)
	}
	return text
}

// byteSize writes bytes for people.
func byteSize(n uint64) string {
	size, unit := float64(n), "B"
	for _, larger := range []string{"KiB", "MiB", "GiB", "TiB"} {
		if size < 1024 {
			break
		}
		size, unit = size/1024, larger
	}
	if unit == "B" {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", size, unit)
}

// windowLength writes the length of a window for people.
func windowLength(d time.Duration) string {
	switch {
	case d >= time.Hour && d%time.Hour == 0:
		return fmt.Sprintf("%d h", d/time.Hour)
	case d >= time.Minute && d%time.Minute == 0:
		return fmt.Sprintf("%d min", d/time.Minute)
	}
	return d.Round(time.Second).String()
}
