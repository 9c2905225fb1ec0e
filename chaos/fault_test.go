package main

import (
	"reflect"
	"testing"
	"time"
)

var someEngines = []string{"engine-0", "engine-1"}

func TestScheduleIsAFunctionOfItsSeed(t *testing.T) {
	all := plots(someEngines, true)
	one := schedule(7, 3, time.Minute, all)
	if !reflect.DeepEqual(one, schedule(7, 3, time.Minute, all)) {
		t.Error("the same seed gives other faults")
	}
	if reflect.DeepEqual(one, schedule(8, 3, time.Minute, all)) {
		t.Error("another seed gives the same faults")
	}
	for _, faults := range one {
		for i, f := range faults {
			if f.At < calm || f.At >= time.Minute || i > 0 && f.At < faults[i-1].At {
				t.Errorf("%v at %v", f, f.At)
			}
		}
	}
}

func TestEveryKindHasItsTurn(t *testing.T) {
	all := plots(someEngines, true)
	for seed := range uint64(20) {
		seen := make(map[kind]int)
		for _, f := range schedule(seed, 1, 10*time.Minute, all)[0][:len(all)] {
			seen[f.Kind]++
		}
		if len(seen) != len(all) {
			t.Errorf("seed %d: %d kinds in the first %d faults: %v", seed, len(seen), len(all), seen)
		}
	}
	for _, f := range schedule(1, 1, 10*time.Minute, plots(someEngines, false))[0] {
		if f.Kind == fillDisk {
			t.Fatal("the disk is filled where that can't be done")
		}
	}
}

func TestOnly(t *testing.T) {
	all := plots(someEngines, true)
	kept, err := only(all, []string{"cut", "kill"})
	if err != nil || len(kept) != 2 || kept[0].kind != cutSockets || kept[1].kind != killProcess {
		t.Errorf("%v, %v", kept, err)
	}
	if _, err := only(all, []string{"flood"}); err == nil {
		t.Error("a fault that there is not")
	}
}
