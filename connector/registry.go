package connector

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Registry knows things by name. The zero value knows none. It is filled before it is used.
type Registry[T any] struct{ byName map[string]T }

// Add adds a thing. A name is given once.
func (r *Registry[T]) Add(name string, thing T) error {
	if name == "" {
		return fmt.Errorf("register %q: want a name", name)
	}
	if _, ok := r.byName[name]; ok {
		return fmt.Errorf("register %q: the name is taken", name)
	}
	if r.byName == nil {
		r.byName = make(map[string]T)
	}
	r.byName[name] = thing
	return nil
}

// Names returns the names, sorted.
func (r *Registry[T]) Names() []string { return slices.Sorted(maps.Keys(r.byName)) }

// Find returns the thing of a name that somebody typed behind a key.
func (r *Registry[T]) Find(key, name string) (T, error) {
	thing, ok := r.byName[name]
	if !ok {
		return thing, fmt.Errorf("%s %q: unknown; there are %s", key, name, strings.Join(r.Names(), ", "))
	}
	return thing, nil
}
