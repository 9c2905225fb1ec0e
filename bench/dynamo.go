package main

type dynamo struct{ o *options }

func newDynamo(o *options) *dynamo { return &dynamo{o} }

func (d *dynamo) measure(r *result) error { return nil }
