package history

import "fmt"

// suggestion asks whether the nearest of some words was meant; it is empty where none is near.
func suggestion(word string, words []string) string {
	best, least := "", min(len(word), 40)/3+2 // edits that are too many
	for _, w := range words {
		if n := edits(word, w, least); n < least {
			best, least = w, n
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf("did you mean %q? ", best)
}

// edits counts how many bytes must be put in, taken out or changed to make one word of another; from a number on, that many.
func edits(a, b string, most int) int {
	if len(a)-len(b) >= most || len(b)-len(a) >= most {
		return most
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		corner := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := corner
			if a[i] != b[j] {
				change++
			}
			corner, row[j+1] = row[j+1], min(change, row[j]+1, row[j+1]+1)
		}
	}
	return min(row[len(b)], most)
}
