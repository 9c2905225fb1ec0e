//go:build race

package redis_test

// raceEnabled says that sync.Pool forgets at random.
const raceEnabled = true
